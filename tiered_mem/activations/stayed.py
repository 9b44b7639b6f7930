"""Counts the tensors that layers save for backward and that stay on the device, by reason."""

from __future__ import annotations

import logging

from ..sizes import format_bytes
from ..stats import REASONS, Moved, Reason

_log = logging.getLogger("tiered_mem.activations.stayed")

_WORDS: dict[Reason, str] = {
    "small": "in tensors below min_bytes",
    "outside": "saved outside the layers of the context: name more of them",
    "other_device": "on another device than the manager's",
    "kind": "in tensors that are more than their bytes, such as quantized or conjugate ones",
    "marked": "marked to stay",
    "no_room": "for which the host tier had no room: raise host_bytes",
    "policy": "left there by the policy",
}


class Stayed:
    """Counts the bytes that one context's forwards save and that stay, and says once where most of them stay.

    totals: those of the manager, by reason, to which each forward adds its own when it ends.
    silent: it says nothing, as the user moves all by hand.
    """

    def __init__(self, totals: dict[Reason, Moved], *, silent: bool = False) -> None:
        self._totals = totals
        self._said = silent
        self._now: dict[Reason, Moved] = {reason: Moved() for reason in REASONS}

    def of(self, reason: Reason) -> Moved:
        """What stays in this forward for the reason. Whoever has many tensors to count counts them there."""
        return self._now[reason]

    def add(self, reason: Reason, nbytes: int) -> None:
        """A tensor stays."""
        self._now[reason].add(nbytes)

    def take_back(self, reason: Reason, nbytes: int) -> None:
        """One that was added moves after all."""
        self._now[reason].take_back(nbytes)

    def forward_ends(self, moved: int | None) -> None:
        """moved: how many bytes of what it has saved have left, or are leaving; None if it was broken off."""
        stayed: dict[Reason, int] = {}
        for reason, now in self._now.items():
            stayed[reason] = now.nbytes
            self._totals[reason].count += now.count
            self._totals[reason].nbytes += now.nbytes
            now.count = now.nbytes = 0
        if moved is None:
            return
        saved = moved + sum(stayed.values())
        if self._said or moved * 2 >= saved:
            return
        self._said = True
        why = [
            f"{format_bytes(nbytes)} {_WORDS[reason]}"
            for reason, nbytes in sorted(stayed.items(), key=lambda item: item[1], reverse=True)
            if nbytes > 0
        ]
        _log.warning(
            "of %s that a forward saved for backward, %s. On the device stay %s",
            format_bytes(saved),
            f"{format_bytes(moved)} move" if moved else "nothing moves",
            ", ".join(why),
        )

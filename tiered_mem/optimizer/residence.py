"""Where the bytes of a bucket of optimizer states rest between steps."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from ..errors import Closed, TierFull
from ..tiers import HostSlot, HostTier
from ..transfer import Ticket

# Inside, the host tier is the caller's alone.
Exclusive = AbstractContextManager[None]


class Residence(Protocol):
    """Where the bytes of one bucket rest between steps. Not thread-safe: one step runs at a time.

    `take` and `leave` come in pairs, and nothing else but `ticket` between them. What is called out of turn raises
    RuntimeError, and what is called after `release` raises Closed.
    """

    @property
    def nbytes(self) -> int: ...

    def fetch(self) -> None:
        """Begins to bring the bytes into host memory, where there is room for them.

        Does not wait, and never raises for a failed read: `take` does.
        """

    @property
    def ready(self) -> bool:
        """Whether `take` would not wait."""

    def take(self, *, blank: bool = False) -> HostSlot:
        """The host memory of the bytes, a uint8 slot of `nbytes`, until `leave`.

        blank: the bytes that there may be are not needed, all of the memory is to be filled.

        May wait. Raises CorruptRecord, OSError, TierFull or Closed before anything is changed, and may be called
        again after that.
        """

    @property
    def ticket(self) -> Ticket | None:
        """The copy that may still fill the host memory: a reload has to come after it."""

    def leave(self, filled: Ticket | None, read: Ticket | None = None) -> None:
        """The copies in and out have been started.

        filled: the one that changed the host memory. None if nothing changed: then nothing is written back.
        read: the one that reads it, where no `filled` comes after that. The memory is left alone until it ended.
        """

    def release(self) -> None:
        """The bytes are not needed any more. Waits for nothing on the device. Again does nothing."""

    def copy_out(self) -> torch.Tensor:
        """The bytes as of the last `leave`: a uint8 tensor in pageable memory. Waits. Raises what `take` does."""

    def copy_in(self, content: torch.Tensor) -> None:
        """Makes these the bytes: a uint8 tensor of `nbytes` elements on the cpu. Waits. Raises what `take` does."""


class HostResidence:
    """Bytes that have a host slot of their own, from now to `release`. See `Residence`.

    exclusive: taken around each use of the host tier.

    Raises TierFull.
    """

    def __init__(self, host: HostTier, exclusive: Exclusive, nbytes: int) -> None:
        self._host = host
        self._exclusive = exclusive
        self._slot: HostSlot | None = reserve(
            host, exclusive, nbytes, "it is for optimizer states: raise host_bytes, or put them on disk"
        )
        self._nbytes = nbytes
        self._exists = False
        self._taken = False
        self._ticket: Ticket | None = None
        self._last: Ticket | None = None  # the copy that ends after all others

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def fetch(self) -> None:
        """They are there."""

    @property
    def ready(self) -> bool:
        return True

    def take(self, *, blank: bool = False) -> HostSlot:
        if self._slot is None:
            raise Closed("the optimizer states were released")
        check_turn(self._taken, False)
        check_exists(self._exists or blank)
        self._taken = True
        return self._slot

    @property
    def ticket(self) -> Ticket | None:
        return self._ticket

    def leave(self, filled: Ticket | None, read: Ticket | None = None) -> None:
        check_turn(self._taken, True)
        self._taken = False
        self._last = filled or read or self._last
        if filled is not None:
            self._ticket = filled
            self._exists = True

    def release(self) -> None:
        check_turn(self._taken, False)
        slot, self._slot = self._slot, None
        if slot is not None:
            with self._exclusive:
                self._host.release(slot, None if self._last is None else self._last.event)
        self._ticket = self._last = None

    def copy_out(self) -> torch.Tensor:
        return copied_out(self)

    def copy_in(self, content: torch.Tensor) -> None:
        check_content(content, self._nbytes)
        slot = self.take(blank=True)
        try:
            wait_for(self._last)
            slot.tensor.copy_(content)
            self._exists = True
        finally:
            self.leave(None)


def reserve(host: HostTier, exclusive: Exclusive, nbytes: int, advice: str) -> HostSlot:
    """A uint8 slot. Raises TierFull with the advice, for the host tier knows only of activations."""
    try:
        with exclusive:
            return host.reserve([(nbytes, torch.uint8)])[0]
    except TierFull as error:
        raise TierFull(
            "host", needed=error.needed, free=error.free, used=error.used, limit=error.limit, advice=advice
        ) from None


def copied_out(residence: Residence) -> torch.Tensor:
    slot = residence.take()
    try:
        wait_for(residence.ticket)
        return slot.tensor.clone()
    finally:
        residence.leave(None)


def wait_for(copy: Ticket | None) -> None:
    """Waits on the host for a copy, if there is one. Raises DeviceFailed."""
    if copy is not None:
        copy.wait()


def check_content(content: torch.Tensor, nbytes: int) -> None:
    if content.dtype != torch.uint8 or content.shape != (nbytes,) or content.device.type != "cpu":
        raise ValueError(
            f"the bytes are to be a uint8 tensor of shape ({nbytes},) on the cpu, and not one of {content.dtype} "
            f"and {tuple(content.shape)} on {content.device}"
        )


def check_turn(taken: bool, expected: bool) -> None:
    if taken != expected:
        raise RuntimeError("the bytes are in use: leave comes first" if taken else "take comes before leave")


def check_exists(exists: bool) -> None:
    if not exists:
        raise RuntimeError("there are no bytes yet: take(blank=True) is for the first ones")

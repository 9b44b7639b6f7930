"""What another offloader's settings beside ours come to."""

from __future__ import annotations

from collections.abc import Mapping


def refuse_others(settings: Mapping[str, object], ours: str) -> None:
    """Raises ValueError where others would move the same tensors. settings: by these, where they are on."""
    on = [setting for setting, is_on in settings.items() if is_on]
    if on:
        others = " and ".join(on)
        raise ValueError(f"{others} and {ours} would both move the same tensors: leave out one of the two")

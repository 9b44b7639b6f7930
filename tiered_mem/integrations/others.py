"""What another offloader's settings beside ours come to."""

from __future__ import annotations

from collections.abc import Sequence


def refuse_others(settings: Sequence[str], ours: str) -> None:
    """Raises ValueError where others would move the same tensors, by the settings that are on."""
    if settings:
        raise ValueError(
            f"{' and '.join(settings)} and {ours} would both move the same tensors: leave out one of the two"
        )

"""The chips and links that are modelled."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ChipLink:
    """A chip by its name in the emulator, and bytes each second to the host and back."""

    chip: str
    out: float
    back: float


LATENCY = 5e-6  # of a copy, in seconds; of all servers that are modelled

LINKS = {
    "910b-50": ChipLink("910b3", 50e9, 50e9),
    "910b-25": ChipLink("910b3", 25e9, 25e9),
    "910b-10": ChipLink("910b3", 10e9, 10e9),
    "h200": ChipLink("h200", 52.6e9, 54e9),
}

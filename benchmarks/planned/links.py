"""The chips and links that are modelled."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import ascend_emulator


@dataclass(frozen=True)
class ChipLink:
    """A chip by its name in the emulator, and bytes each second to the host and back."""

    chip: str
    out: float
    back: float


_HOST = "1TiB"
LATENCY = 5e-6  # of a copy, in seconds; of all servers that are modelled

LINKS = {
    "910b-50": ChipLink("910b3", 50e9, 50e9),
    "910b-25": ChipLink("910b3", 25e9, 25e9),
    "910b-10": ChipLink("910b3", 10e9, 10e9),
    "h200": ChipLink("h200", 52.6e9, 54e9),
}


def start(there: ChipLink) -> None:
    """Models this chip behind its link, in dry runs in this process. Before torch is imported."""
    os.environ["TIERED_MEM_HOST_LIMIT"] = _HOST  # what the modelled server has, and not this machine
    ascend_emulator.start(
        hbm_bytes="400GiB",
        host_bytes=_HOST,
        clock=there.chip,
        dry=True,
        schedule="eager",
        races=False,
        h2d_bytes_per_s=int(there.back),
        d2h_bytes_per_s=int(there.out),
    )
    logging.getLogger("tiered_mem").setLevel(logging.ERROR)

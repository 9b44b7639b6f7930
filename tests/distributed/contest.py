"""Trains in each of several ways, plainly and with tiering, as a rank of a job."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from emulator.tests.hccl_rank import rank_of_job
from tiered_mem import TieringManager

DEVICE = "npu"

Found = dict[str, Any]
# Takes the way to train, and the peak of the plain training.
Tiered = Mapping[str, Callable[[str, int], Found]]


def planned(budget: float, host_bytes: str) -> TieringManager:
    """budget: bytes beyond what is allocated now."""
    total = torch.npu.memory_allocated() + int(budget)
    return TieringManager(device=DEVICE, device_budget=total, host_bytes=host_bytes)


def contest(ways: Iterable[str], plain: Callable[[str], Found], tiered: Tiered) -> None:
    """Says what each of the ways that are asked for on the command line gave, by the kind of tiering."""
    parser = argparse.ArgumentParser()
    parser.add_argument("ways", nargs="+", choices=ways)
    parser.add_argument("--tiered", nargs="+", choices=tiered, default=list(tiered))
    options = parser.parse_args()
    with rank_of_job() as said:
        for way in options.ways:
            without = plain(way)
            said[way] = {"plain": without} | {kind: tiered[kind](way, without["peak"]) for kind in options.tiered}

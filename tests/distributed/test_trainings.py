"""Trainings on several emulated NPUs, over HCCL: tiering changes no bit of them, and there is no race."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from emulator.tests.hccl_jobs import SCHEDULES, said

WORKER = "tests.distributed.training"
COMPUTING = ("cheap", "full")
EACH, UNLIKE = "one by moving, one by computing", "auto, unlike"
# A way has all kinds of tiering, and not each in all schedules.
OF_TWO: dict[str, dict[str, tuple[str, ...]]] = {
    "fsdp2": {"eager": ("cheap", "auto"), "late": ("full", UNLIKE), "random": ("layer order",)},
    "fsdp2, kept whole": {"eager": ("cheap", EACH), "late": ("full",), "random": ("layer order", UNLIKE)},
    "fsdp2, bf16": {"eager": ("cheap", "auto"), "late": ("full", UNLIKE), "random": ("layer order",)},
    "fsdp2, checkpointed": {"eager": ("cheap", EACH), "late": ("full",), "random": ("layer order", UNLIKE)},
    "ddp": {"eager": ("cheap", "auto"), "late": ("full", UNLIKE), "random": ("layer order",)},
    "tp": {"eager": (EACH, "auto"), "late": ("full",), "random": ("layer order", UNLIKE)},
}
OF_FOUR = {
    "fsdp2, whole in pairs": ("layer order", UNLIKE),
    "hsdp": ("full", UNLIKE),
    "tp": ("layer order", UNLIKE),
}
OF_EIGHT = {"fsdp2": ("cheap", UNLIKE)}
# Layers with collectives of their own are not computed again.
OF_ITS_OWN = ("tp",)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_two_ranks_come_to_the_plain_bits(schedule: tuple[str, ...], tmp_path: Path) -> None:
    ways = {way: kinds[schedule[0]] for way, kinds in OF_TWO.items()}
    check(said(tmp_path, 2, ("--races", "--schedule", *schedule), WORKER, json.dumps(ways)), ways)


def test_four_ranks_come_to_the_plain_bits(tmp_path: Path) -> None:
    options = ("--races", "--schedule", "late")
    # To gather within pairs FSDP2 makes communicators for each layer, whose buffers fill the device by default.
    check(said(tmp_path, 4, options, WORKER, json.dumps(OF_FOUR), HCCL_BUFFSIZE="8"), OF_FOUR)


def test_eight_ranks_come_to_the_plain_bits(tmp_path: Path) -> None:
    options = ("--races", "--schedule", "random", "--seed", "5")
    check(said(tmp_path, 8, options, WORKER, json.dumps(OF_EIGHT)), OF_EIGHT)


def check(lines: list[Any], ways: Mapping[str, tuple[str, ...]]) -> None:
    """Each rank's bits are those of the plain training, and its peak is lower by what moved or was not kept."""
    for line in lines:
        assert line["races"] == []
        for way, kinds in ways.items():
            plain = line[way].pop("plain")
            assert line[way].keys() == set(kinds)
            for tiered, found in line[way].items():
                assert found["digest"] == plain["digest"], (way, tiered)
                assert found["peak"] < 0.85 * plain["peak"], (way, tiered)
                assert found["moved"] > 0, (way, tiered)
                again = tiered in COMPUTING and way not in OF_ITS_OWN
                assert not again or found["forwards"] > plain["forwards"], (way, tiered)

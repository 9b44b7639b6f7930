"""Trainings on several emulated NPUs, over HCCL: tiering changes no bit of them, and there is no race."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from emulator.tests.hccl_jobs import SCHEDULES, said

WORKER = "tests.distributed.training"
COMPUTING = ("cheap", "full")
WAYS = {
    "eager": ("cheap", "one by moving, one by computing", "auto"),
    "late": ("full", "auto, unlike"),
    "random": ("layer order", "auto, unlike"),
}
OF_TWO = ("fsdp2", "fsdp2, kept whole", "fsdp2, bf16", "fsdp2, checkpointed", "ddp", "tp")
OF_FOUR = ("fsdp2, whole in pairs", "hsdp", "tp")
# Layers with collectives of their own are not computed again.
OF_ITS_OWN = ("tp",)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_two_ranks_come_to_the_plain_bits(schedule: tuple[str, ...], tmp_path: Path) -> None:
    options = ("--races", "--schedule", *schedule)
    check(said(tmp_path, 2, options, WORKER, *OF_TWO, "--tiered", *WAYS[schedule[0]]), OF_TWO)


def test_four_ranks_come_to_the_plain_bits(tmp_path: Path) -> None:
    options = ("--races", "--schedule", "late")
    ways = ("layer order", "full", "auto, unlike")
    # To gather within pairs FSDP2 makes communicators for each layer, whose buffers fill the device by default.
    lines = said(tmp_path, 4, options, WORKER, *OF_FOUR, "--tiered", *ways, HCCL_BUFFSIZE="8")
    check(lines, OF_FOUR)


def test_eight_ranks_come_to_the_plain_bits(tmp_path: Path) -> None:
    options = ("--races", "--schedule", "random", "--seed", "5")
    ways = ("cheap", "auto, unlike")
    check(said(tmp_path, 8, options, WORKER, "fsdp2", "--tiered", *ways), ("fsdp2",))


def check(lines: list[Any], spread: tuple[str, ...]) -> None:
    """Each rank's bits are those of the plain training, and its peak is lower by what moved or was not kept."""
    for line in lines:
        assert line["races"] == []
        for way in spread:
            plain = line[way].pop("plain")
            for tiered, found in line[way].items():
                assert found["digest"] == plain["digest"], (way, tiered)
                assert found["peak"] < 0.85 * plain["peak"], (way, tiered)
                assert found["moved"] > 0, (way, tiered)
                again = tiered in COMPUTING and way not in OF_ITS_OWN
                assert not again or found["forwards"] > plain["forwards"], (way, tiered)

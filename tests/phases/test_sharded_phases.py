"""Models that several ranks share leave between steps and come back, over the emulator's HCCL."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from emulator.tests.hccl_jobs import SCHEDULES, job, said

pytestmark = pytest.mark.once(why="its processes have a schedule of their own")

WORKER = "tests.phases.sharded_worker"
LOSSES = 512  # what the device has them in


def check(line: dict[str, Any], ways: Sequence[str], cycles: int) -> None:
    """That a rank has found the training without phases, and free memory."""
    assert line["races"] == []
    for way in ways:
        found = line[way]
        assert found["outcome"] == found["plain"], way
        assert found["refusals"] == cycles, way
        assert min(found["falls"]) >= found["shards"] > 0, way
        if "ddp" not in way:  # which has buckets, and makes them anew after the first step
            assert {nothing_here for nothing_here, *_ in found["levels"]} == {LOSSES}, way
            assert len(set(map(tuple, found["levels"][1:]))) == 1, way


@job
@pytest.mark.parametrize(("schedule", "cycles"), list(zip(SCHEDULES, (50, 10, 10), strict=True)), ids=str)
def test_a_sharded_training_with_phases_is_the_one_without(
    schedule: tuple[str, ...], cycles: int, tmp_path: Path
) -> None:
    """Uneven shards, a tied weight and a frozen one; from the second cycle on there is no growth."""
    for line in said(tmp_path, 4, ("--races", "--schedule", *schedule), WORKER, str(cycles), "fsdp2"):
        check(line, ["fsdp2"], cycles)


@job
def test_each_way_to_share_a_model(tmp_path: Path) -> None:
    ways = ("kept", "over two", "bf16", "hsdp", "tensor parallel", "ddp", "ddp, views")
    options = ("--races", "--schedule", "late")
    for line in said(tmp_path, 4, options, WORKER, "3", *ways, HCCL_BUFFSIZE="8"):
        check(line, ways, 3)


@job
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_two_ranks(schedule: tuple[str, ...], tmp_path: Path) -> None:
    ways = ("kept", "fsdp2", "tensor parallel", "ddp")
    for line in said(tmp_path, 2, ("--races", "--schedule", *schedule), WORKER, "3", *ways):
        check(line, ways, 3)

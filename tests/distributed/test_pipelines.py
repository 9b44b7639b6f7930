"""Pipelines over several emulated NPUs: tiering changes no bit of any schedule, and there is no race."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from emulator.tests.hccl_jobs import SCHEDULES, said

WORKER = ("-m", "tests.distributed.pipeline")


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_two_stages(schedule: tuple[str, ...], tmp_path: Path) -> None:
    ways = () if schedule == ("eager",) else ("--tiered", "auto, 50 %")
    check(said(tmp_path, 2, ("--races", "--schedule", *schedule), *WORKER, "GPipe", "1F1B", *ways))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_two_stages_on_each_of_two_ranks(schedule: tuple[str, ...], tmp_path: Path) -> None:
    options = ("--races", "--schedule", *schedule)
    check(said(tmp_path, 2, options, *WORKER, "interleaved", "zero bubble", "ZBV", "--tiered", "auto, 50 %"))


def test_four_ranks(tmp_path: Path) -> None:
    options = ("--races", "--schedule", "late")
    names = ("1F1B", "1F1B, sharded", "zero bubble")
    ways = ("--tiered", "layer order", "auto, 50 %")
    # FSDP2 beside the pipeline makes communicators, whose buffers fill the device by default.
    check(said(tmp_path, 4, options, *WORKER, *names, *ways, HCCL_BUFFSIZE="8"))


def check(lines: list[Any]) -> None:
    for line in lines:
        assert line.pop("races") == []
        for name in line.keys() - {"rank"}:
            plain = line[name].pop("plain")
            for way, found in line[name].items():
                assert found["digest"] == plain["digest"], (name, way)
                assert found["peak"] < plain["peak"], (name, way)
                assert found["moved"] > 0, (name, way)

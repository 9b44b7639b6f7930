"""Pipelines over several emulated NPUs: tiering changes no bit of any schedule, and there is no race."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from emulator.tests.hccl_jobs import SCHEDULES, said

WORKER = "tests.distributed.pipeline"
WAYS = {"eager": ("layer order",), "late": ("auto, 50 %",), "random": ("auto, 50 %",)}


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_two_ranks(schedule: tuple[str, ...], tmp_path: Path) -> None:
    """The last three have two stages on each."""
    options = ("--races", "--schedule", *schedule)
    names = ("GPipe", "1F1B", "interleaved", "zero bubble", "ZBV")
    check(said(tmp_path, 2, options, WORKER, *names, "--tiered", *WAYS[schedule[0]]))


def test_four_ranks(tmp_path: Path) -> None:
    options = ("--races", "--schedule", "late")
    names = ("1F1B", "1F1B, sharded", "zero bubble")
    ways = ("--tiered", "layer order", "auto, 50 %")
    # FSDP2 beside the pipeline makes communicators, whose buffers fill the device by default.
    check(said(tmp_path, 4, options, WORKER, *names, *ways, HCCL_BUFFSIZE="8"))


def check(lines: list[Any]) -> None:
    for line in lines:
        assert line.pop("races") == []
        for name in line.keys() - {"rank"}:
            plain = line[name].pop("plain")
            for way, found in line[name].items():
                assert found["digest"] == plain["digest"], (name, way)
                assert found["peak"] < plain["peak"], (name, way)
                assert found["moved"] > 0, (name, way)

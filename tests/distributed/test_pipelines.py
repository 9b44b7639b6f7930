"""Pipelines over several emulated NPUs: tiering changes no bit of any schedule, and there is no race."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from emulator.tests.hccl_jobs import SCHEDULES, said

WORKER = "tests.distributed.pipeline"
MOVED, PLANNED = ("layer order",), ("auto, 50 %",)
OF_TWO = {
    "eager": dict.fromkeys(("GPipe", "1F1B", "interleaved", "zero bubble", "ZBV"), MOVED),
    "late": dict.fromkeys(("GPipe", "1F1B", "ZBV"), PLANNED),
    "random": dict.fromkeys(("interleaved", "zero bubble"), PLANNED),
}
OF_FOUR = {"1F1B": MOVED, "1F1B, sharded": PLANNED, "zero bubble": MOVED + PLANNED}


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_two_ranks(schedule: tuple[str, ...], tmp_path: Path) -> None:
    """The interleaved ones, zero bubble and ZBV have two stages on each."""
    ways = OF_TWO[schedule[0]]
    check(said(tmp_path, 2, ("--races", "--schedule", *schedule), WORKER, json.dumps(ways)), ways)


def test_four_ranks(tmp_path: Path) -> None:
    options = ("--races", "--schedule", "late")
    # FSDP2 beside the pipeline makes communicators, whose buffers fill the device by default.
    check(said(tmp_path, 4, options, WORKER, json.dumps(OF_FOUR), HCCL_BUFFSIZE="8"), OF_FOUR)


def check(lines: list[Any], ways: Mapping[str, tuple[str, ...]]) -> None:
    for line in lines:
        assert line["races"] == []
        for name, kinds in ways.items():
            plain = line[name].pop("plain")
            assert line[name].keys() == set(kinds)
            for way, found in line[name].items():
                assert found["digest"] == plain["digest"], (name, way)
                assert found["peak"] < plain["peak"], (name, way)
                assert found["moved"] > 0, (name, way)

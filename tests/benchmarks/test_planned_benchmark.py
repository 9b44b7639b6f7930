"""The benchmark of policy="auto" runs, in a process of its own and on a modelled NPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.planned.__main__ import OTHERS
from tests.conftest import EMULATED

pytestmark = [
    pytest.mark.skipif(not EMULATED, reason="it needs the emulated NPU"),
    pytest.mark.slow(why="a program that trains some dozen times"),
    pytest.mark.schedules("eager", why="it starts a process of its own, which has its schedule"),
]


def measured(folder: Path, *options: str) -> dict[str, Any]:
    """One model behind one link, where nothing misses what it is to keep."""
    file = folder / "planned.json"
    command = [sys.executable, "-m", "benchmarks.planned", *options, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    [found] = json.loads(file.read_text())
    return dict(found)


def test_memory_of_a_batch_that_the_program_keeps_is_not_counted_on(tmp_path: Path) -> None:
    """Its first layer saves the images, which are there until the step's end."""
    found = measured(tmp_path, "--models", "vit-h", "--links", "910b-25", "--budgets", "50")
    assert all(row["auto"]["peak"] <= row["budget"] for row in found["rows"])


def test_auto_is_ahead_of_all_others_and_within_its_budget(tmp_path: Path) -> None:
    found = measured(tmp_path, "--models", "gpt-8", "--links", "910b-25", "--budgets", "90", "75")
    assert found["repeatable"]
    for row in found["rows"]:
        auto = row["auto"]
        assert auto["peak"] <= row["budget"]
        assert auto["seconds"] <= 1.02 * row["bound"]
        others = [row[name] for name in OTHERS if row[name] is not None]
        assert auto["seconds"] <= 1.002 * min(each["seconds"] for each in others if each["peak"] <= row["budget"])
    wide, narrow = found["rows"]
    assert wide["checkpoint"]["setting"] == "first 1"
    assert narrow["checkpoint"]["setting"] == "first 2"
    # What is kept of a layer are the scores of attention above all.
    assert wide["selective"]["setting"] == "first 4"
    assert narrow["selective"] is None
    for row in found["rows"]:
        assert found["plain"]["seconds"] < row["checkpoint"]["seconds"] < row["inputs_moved"]["seconds"]


def test_a_step_that_is_recorded_or_timed_is_hardly_longer() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.recording_cost", "gpt-8"], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert all(-0.02 < share < 0.02 for share in found["gpt-8"].values()), found

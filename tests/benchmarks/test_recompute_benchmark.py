"""The benchmarks of layers that are computed again run, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.overlaps import OVERLAPS
from tests.conftest import EMULATED, RACES

pytestmark = [
    pytest.mark.skipif(not EMULATED, reason="it needs the emulated NPU"),
    pytest.mark.slow(why="each is a program that trains some dozen times"),
    pytest.mark.schedules("eager", why="it starts a process of its own, which has its schedule"),
]
no_detector = pytest.mark.skipif(RACES, reason="it measures, and the detector takes its part of the time")
SMALL = ("--layers", "3", "--width", "64", "--context", "128", "--batch", "8")


def run(file: Path, *command: str) -> Any:
    """What it writes to the file."""
    words = [sys.executable, "-m", *command, "--json", str(file)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text())


def test_as_few_layers_are_checkpointed_as_keep_the_budget(tmp_path: Path) -> None:
    ways = ("plain", "full-best")
    found = run(tmp_path / "found.json", "benchmarks.recompute", "--sizes", "7b-4096", "--ways", *ways)
    plain, best = (found["7b-4096"][way] for way in ways)
    # One layer less would not have: it saves 0.8 GiB.
    assert (29 << 30) - (850 << 20) < best["peak"] <= 29 << 30 < plain["peak"]
    layers = int(best["setting"].removeprefix("first "))
    assert 0 < layers < 32
    again = plain["forward"] * layers / 32
    assert best["forward"] == pytest.approx(plain["forward"], rel=1e-3)
    assert plain["backward"] + 0.7 * again < best["backward"] < plain["backward"] + again


def test_states_that_come_and_leave_beside_a_training(tmp_path: Path) -> None:
    ways = ("plain", "plain-host", *(f"plain-{overlap}" for overlap in OVERLAPS))
    found = run(tmp_path / "found.json", "benchmarks.recompute", "--sizes", "7b-8192", "--ways", *ways)
    plain, after, *beside = (found["7b-8192"][way] for way in ways)
    assert after["step"] > 1.3 * plain["step"]
    assert after["peak"] < plain["peak"]
    for each in beside:
        assert each["step"] < 1.03 * plain["step"]
        assert each["peak"] < plain["peak"]
    # In backward gradients are freed bucket by bucket. The largest is of 250 MiB.
    backward = found["7b-8192"]["plain-backward"]
    assert 250 << 20 <= backward["gradients"] <= 512 << 20 < after["gradients"] == plain["gradients"]


@no_detector
def test_seconds_within_a_budget(tmp_path: Path) -> None:
    emulated = ("ascend_emulator", "--h2d", "1GB/s", "--d2h", "1GB/s", "-m")
    options = (*SMALL, "--budget", "0.75", "--rounds", "1")
    found = run(tmp_path / "found.json", *emulated, "benchmarks.recompute.seconds", *options)
    assert all(row["right"] for row in found["rows"])
    peaks = {row["name"]: row["peak"] for row in found["rows"]}
    assert peaks["auto"] <= found["budget"] < peaks["plain"]
    assert max(peaks[name] for name in peaks if "best" in name) <= found["budget"]


@no_detector
def test_host_time_of_each_operator(tmp_path: Path) -> None:
    emulated = ("ascend_emulator", "-m")
    options = ("--layers", "2", "--rounds", "2")
    found = run(tmp_path / "found.json", *emulated, "benchmarks.recompute.host_time", *options)
    rows = {row["name"]: row for row in found["rows"]}
    assert {row["gradients"] for row in rows.values()} == {"bit-equal"}
    assert rows["plain"]["again"] == rows["no recompute"]["again"] == 0
    # The two checkpoints compute the same again; what is cheap is less than all.
    assert 0 < rows["cheap"]["again"] == rows["torch's selective checkpoint"]["again"] < rows["full"]["again"]
    assert rows["full"]["again"] == rows["torch's checkpoint"]["again"] <= found["layers"]

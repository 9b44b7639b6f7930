"""The benchmark of whole steps beside which states move: what it tells, and a run in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from benchmarks.overlapped_step import PLAIN, Found, figures
from benchmarks.overlaps import OVERLAPS
from benchmarks.turns import Spent
from tests.conftest import EMULATED, RACES
from tiered_mem.optimizer.registered import Overlap

ROOT = Path(__file__).parents[2]


def found(**walls: list[float]) -> Found:
    """Of seconds by the training's name, with _ for what no name of Python's has."""
    names = {"plain": PLAIN, "host_backward": "host, backward"}
    spent = {names.get(name, name): [Spent(wall, wall, 100) for wall in each] for name, each in walls.items()}
    return Found(spent, link_s=0.5, drive_s=0.8, backward_s=1.5)


@pytest.mark.once(why="it needs no device")
def test_each_overlap_is_measured() -> None:
    assert {*OVERLAPS, "auto"} == set(get_args(Overlap))  # which is one of the others


@pytest.mark.once(why="it needs no device")
def test_what_a_step_takes_beyond_the_plain_one_of_its_round() -> None:
    # The second round is slow for everyone.
    seconds = found(plain=[2.0, 4.0, 2.1], host=[2.5, 4.5, 2.6], host_backward=[2.05, 4.0, 2.15])
    assert seconds.beyond("host") == pytest.approx(0.5)
    assert seconds.beyond("host, backward") == pytest.approx(0.05)
    assert seconds.at_most["host, backward"] == pytest.approx(0.15 * 0.5)
    assert seconds.at_most["disk, backward"] == pytest.approx(0.3 * 0.8)
    assert "host" not in seconds.at_most
    told = figures(seconds, 8, equal=True)
    assert told["host, beyond plain, over the link's time"] == pytest.approx(1)
    assert told["host, backward, beyond plain, over the slower of link and drive"] == pytest.approx(0.05 / 0.8)


@pytest.mark.skipif(not EMULATED, reason="it needs the emulated NPU")
@pytest.mark.slow(why="a program that trains some dozen times")
@pytest.mark.schedules("eager", why="it starts a process of its own, which has its schedule")
@pytest.mark.skipif(RACES, reason="it measures, and the detector takes its part of the time")
def test_all_overlaps_end_with_the_same_parameters(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    small = ("--layers", "2", "--width", "64", "--context", "64", "--bucket", "1MiB", "--rounds", "2")
    command = (sys.executable, "-m", "ascend_emulator", "-m", "benchmarks.overlapped_step", *small)
    done = subprocess.run(
        [*command, "--dir", str(tmp_path), "--json", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "parameters are the same to the last bit" in done.stdout
    told = json.loads(file.read_text())
    assert told["backward alone (s)"] == pytest.approx(3 * told["link (s)"], rel=1e-3)
    for residency in ("host", "disk"):
        assert f"{residency}, beyond plain (s)" in told
        assert all(f"{residency}, {overlap}, beyond plain at most (s)" in told for overlap in OVERLAPS)

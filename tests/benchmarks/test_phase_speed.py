"""How fast models leave and come back, on the modelled clock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.phase_speed import PLAIN, RATE_AT_LEAST, SHARDED, TO_DEVICE, TO_HOST
from emulator.tests.launch import EMULATOR, ROOT, run

pytestmark = pytest.mark.once(why="its process has a clock of its own")


@pytest.mark.slow(why="a program that imports torch, in a process of its own")
def test_models_move_at_the_rate_of_one_copy(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    options = ("--clock", "910b3", "--dry", "--hbm", "64GiB", "--host", "64GiB")
    small = ("--layers", "4", "--rounds", "2", "--json", str(file))
    done = run(*EMULATOR, *options, "-m", "benchmarks.phase_speed", *small, cwd=tmp_path, pythonpath=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(file.read_text())
    for name in (PLAIN, SHARDED):
        for direction in (TO_HOST, TO_DEVICE):
            assert RATE_AT_LEAST <= told[f"{name}, {direction}, over one copy's"] <= 1.001

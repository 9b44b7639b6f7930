"""policy="auto" where lengths or the link change, on the modelled clock of a dry run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from emulator.tests.launch import EMULATOR, run

pytestmark = [
    pytest.mark.slow(why="a process trains for hundreds of steps"),
    pytest.mark.schedules("eager", why="a process of its own"),
]

MACHINE = ("--clock", "910b3", "--dry", "--hbm", "9GiB", "--host", "64GiB", "--h2d", "32GB/s", "--d2h", "32GB/s")


def train(kind: str) -> dict[str, list[float]]:
    """The seconds of the steps. A step that runs out of the device's memory is an error."""
    program = ("-m", "tests.manager.changing_steps", kind)
    here = Path.cwd()
    done = run(*EMULATOR, *MACHINE, *program, cwd=here, pythonpath=here, TIERED_MEM_HOST_LIMIT="64GiB")
    assert done.returncode == 0, done.stderr
    found: dict[str, list[float]] = json.loads(done.stdout)
    return found


def test_a_link_that_becomes_half_as_fast_is_planned_for_within_five_steps() -> None:
    found = train("link")
    fresh = found.pop("slow")[-1]
    for name, seconds in found.items():
        changed = int(name.split()[-1])
        assert min(seconds[changed + 5 : changed + 8]) <= 1.02 * fresh, name


def test_lengths_at_random_fit_and_take_as_long_as_if_each_were_planned_for() -> None:
    found = train("lengths")
    assert len(found["changing"]) == 300
    assert sum(found["changing"]) <= 1.03 * sum(found["alone"])

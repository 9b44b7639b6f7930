"""Processes that are killed, and what the next one to start leaves of theirs: nothing. See kill_*.py."""

from __future__ import annotations

import json

import pytest

from emulator.tests.launch import run
from tests.spill.without_torch import ROOT

TIMES = 20


@pytest.fixture(scope="module")
def killed() -> dict[str, int | dict[str, int]]:
    done = run("-m", "tests.spill.kill_owners", "--times", f"{TIMES}", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_nothing_is_left_of_processes_killed_at_random_moments(killed: dict[str, dict[str, int]]) -> None:
    points = killed["killed at random"]
    assert sum(points.values()) == TIMES
    assert len(points) > 1, "all were killed at the same point of their lives"


@pytest.mark.parametrize("work", ["life", "sweep"])
def test_nothing_is_left_of_processes_killed_before_any_call(killed: dict[str, int], work: str) -> None:
    assert killed[f"killed before each call of a {work}"] > 10


@pytest.mark.slow(why="it kills process after process")
def test_processes_killed_while_they_move_records_harm_nobody() -> None:
    done = run("-m", "tests.spill.kill_tiers", "--times", f"{TIMES}", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    points = json.loads(done.stdout)
    assert sum(points.values()) == TIMES
    assert len(points) > 1, "all were killed at the same point of their lives"

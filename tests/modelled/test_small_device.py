"""A device that is too small for its training, at real size: what lies unused in torch's pool ends no step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from emulator.tests.launch import EMULATOR, run

pytestmark = pytest.mark.slow(why="a process makes sixteen steps at real size, in a dry run")

GIB = 1 << 30
# Of the 31 GiB that the plain step takes.
DEVICES = [
    ("14GiB", "none", 0.96 * 14 * GIB),
    ("20GiB", "none", 0.96 * 20 * GIB),
    ("14GiB", "13.6GiB", 13.6 * GIB),
]


def train(hbm: str, budget: str) -> tuple[dict[str, int], str]:
    here = Path.cwd()
    options = ("--dry", "--clock", "910b3", "--host", "512GiB", "--hbm", hbm)
    program = ("-m", "tests.modelled.small_device", budget)
    done = run(*EMULATOR, *options, *program, cwd=here, pythonpath=here, TIERED_MEM_HOST_LIMIT="512GiB")
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, int] = json.loads(done.stdout)
    return found, done.stderr


@pytest.mark.parametrize(("hbm", "budget", "most"), DEVICES)
def test_a_training_that_fits_the_budget_goes_on(hbm: str, budget: str, most: float) -> None:
    found, _ = train(hbm, budget)
    assert found["peak"] <= most


def test_an_optimizer_finds_room_where_there_is_no_piece_for_its_window() -> None:
    _, told = train("13GiB", "none")
    assert "torch's pool has no piece for it" in told

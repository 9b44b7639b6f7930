"""A dry run: the same allocations and the same timeline as a real one, without data and without memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from emulator.tests.launch import EMULATOR, run

pytestmark = pytest.mark.slow(why="two processes train six models each")

GIB = 1 << 30
CLOCK = ("--clock", "910b3", "--hbm", "64GiB")
PROGRAM = ("-m", "tests.modelled.dry_training")
RUNS = [f"{how} {what}" for how in ("plain", "tiered", "scaled") for what in ("GPT", "Llama")]

Found = dict[str, dict[str, Any]]


def train(*options: str, program: tuple[str, ...] = PROGRAM, **environment: str) -> Found:
    here = Path.cwd()
    done = run(*EMULATOR, *CLOCK, *options, *program, cwd=here, pythonpath=here, **environment)
    assert done.returncode == 0, done.stderr
    found: Found = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def real() -> Found:
    return train()


@pytest.fixture(scope="module")
def dry() -> Found:
    return train("--dry", "--host", "512GiB", program=(*PROGRAM, "large"), TIERED_MEM_HOST_LIMIT="512GiB")


@pytest.mark.parametrize("name", RUNS)
def test_allocations_are_the_real_ones(real: Found, dry: Found, name: str) -> None:
    assert len(real[name]["allocations"]) > 100
    assert dry[name]["allocations"] == real[name]["allocations"]
    assert dry[name]["peak"] == real[name]["peak"] > 0


@pytest.mark.parametrize("name", RUNS)
def test_the_timeline_is_the_real_one(real: Found, dry: Found, name: str) -> None:
    assert len(real[name]["timeline"]) > 100
    assert dry[name]["timeline"] == real[name]["timeline"]
    assert dry[name]["now"] == real[name]["now"]


def test_what_is_large_takes_no_memory(dry: Found) -> None:
    large = dry["large"]
    assert large["device"] > 8 * GIB
    assert large["host"] > 4 * GIB
    assert large["rss"] < GIB // 2

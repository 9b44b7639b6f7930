"""What the emulator's table names takes the same memory and time in a dry run, or as much of them as it says."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from emulator.coverage import DRY, ROWS
from tests.modelled.test_dry import Found, train

pytestmark = pytest.mark.slow(why="two processes train all that the table names")

PROGRAM = ("-m", "tests.modelled.dry_coverage")


@pytest.fixture(scope="module")
def real() -> Found:
    return train(program=PROGRAM)


@pytest.fixture(scope="module")
def dry() -> Found:
    return train("--dry", "--dry-routing", "uniform", program=PROGRAM)


@pytest.mark.parametrize("name", ROWS)
def test_it_takes_the_same_memory_and_time(real: Found, dry: Found, name: str) -> None:
    told = DRY.get(name, "all")
    assert dry[name]["peak"] == real[name]["peak"] > 0
    if told != "peak":
        assert len(real[name]["allocations"]) > 100
        assert dry[name]["allocations"] == real[name]["allocations"]
    if told == "all":
        assert len(real[name]["timeline"]) > 100
        assert dry[name]["timeline"] == real[name]["timeline"]


# Its experts have other shares, of as many tokens in all.
def test_a_mixture_of_experts_has_the_same_work_in_all(real: Found, dry: Found) -> None:
    name = "Mixtral of transformers"

    def work(found: dict[str, Any]) -> Counter[str]:
        written: Counter[str] = Counter()
        for kind, nbytes, *_ in found["timeline"]:
            written[kind] += nbytes
        return written

    assert work(dry[name]) == work(real[name])
    assert dry[name]["timeline"] != real[name]["timeline"]

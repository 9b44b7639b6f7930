"""What the benchmark of policy="auto" finds wrong, and whom it takes for the best of the others."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.planned.__main__ import best_other, bounds, misses, not_near, others

pytestmark = pytest.mark.once(why="it needs no device")


def found(repeatable: bool = True, **changed: Any) -> dict[str, Any]:
    """A cell in which auto is the best."""

    def taken(seconds: float, peak: int, setting: str = "") -> dict[str, Any]:
        return {"seconds": seconds, "peak": peak, "first": 2 * seconds, "setting": setting}

    row = {
        "share": 0.5,
        "budget": 100,
        "least": 1.24,
        "bound": 1.2,
        "foreseeable": 1.2,
        "auto": taken(1.25, 100),
        "error": None,
        "layer_order": taken(1.9, 90, "k=2, in flight 0"),
        "megatron": None,
        "smart_swap": taken(1.1, 101),
        "checkpoint": taken(1.25, 80, "first 4"),
        "selective": taken(1.3, 99, "last 4"),
        "inputs_moved": taken(1.4, 40, "k=8, in flight 1"),
    }
    row |= {name: taken(*value) if isinstance(value, tuple) else value for name, value in changed.items()}
    return {"model": "gpt", "link": "slow", "repeatable": repeatable, "plain": taken(1.0, 200), "rows": [row]}


@pytest.mark.parametrize(
    ("changed", "miss"),
    [
        ({"auto": (1.25, 101)}, "at 50% the peak is 1.0100 of the budget"),
        ({"auto": (1.26, 100)}, "at 50% auto takes 1.008 of checkpoint first 4"),
        ({"selective": (1.2, 99, "last 4")}, "at 50% auto takes 1.042 of selective last 4"),
        ({"inputs_moved": (1.2, 99, "k=8, in flight 1")}, "at 50% auto takes 1.042 of inputs k=8, in flight 1"),
        ({"smart_swap": (1.0, 100)}, "at 50% auto takes 1.250 of SmartSwap"),
        ({"least": 1.125}, "at 50% auto takes 1.111 of the least"),
        ({"foreseeable": 1.0}, "at 50% auto takes 1.2500 of the plain step, where all can hide"),
        ({"auto": None, "error": "5 GiB are too little. More"}, "at 50% there is no plan: 5 GiB are too little"),
    ],
)
def test_what_misses(changed: dict[str, Any], miss: str) -> None:
    assert list(misses(found(**changed))) == [miss]


def test_nothing_misses_where_auto_is_as_fast_as_the_best() -> None:
    assert list(misses(found())) == []
    assert list(misses(found(auto=(1.2525, 100)))) == []  # within what rounding may do


def test_that_auto_is_far_from_the_least_too_often_is_a_miss() -> None:
    near, far = found(), found(least=1.2)
    assert not_near([near] * 9 + [far]) == []
    assert not_near([near] * 8 + [far] * 2) == ["auto takes more than 1.03 of the least in 2 of 10 cells"]


def test_other_numbers_do_not_count() -> None:
    cell = found(repeatable=False)
    assert best_other(cell, cell["rows"][0]) == "layer_order"
    assert list(misses(found(repeatable=False, auto=(1.8, 100), least=1.8))) == []


def test_the_tables_have_a_row_for_each_cell() -> None:
    cells = [found(), found(repeatable=False), found(auto=None, error="none. No")]
    assert [table(cells).row_count for table in (bounds, others)] == [3, 3]

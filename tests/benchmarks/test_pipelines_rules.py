"""What benchmarks.pipelines counts as a miss."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.pipelines.__main__ import judged

pytestmark = pytest.mark.once(why="it needs no device")

BUDGETS = (100, 200)


def ranks(seconds: float, peaks: tuple[int, int], budgets: tuple[int, int] = BUDGETS) -> list[dict[str, Any]]:
    """What two ranks said of three steps. The first step counts for nothing."""
    return [
        {"rank": rank, "seconds": [9.0, 9.0, seconds - 0.1 * rank], "peaks": [999, peak, peak], "budget": budget}
        for rank, (peak, budget) in enumerate(zip(peaks, budgets, strict=True))
    ]


def row(auto: list[dict[str, Any]], layers: list[dict[str, Any]]) -> dict[str, Any]:
    found = {"plain": ranks(1.0, (150, 300)), "layers 4": layers, "auto 50": auto}
    (only,) = judged("1F1B", found)
    return only


def test_a_step_is_as_long_as_that_of_the_slowest_rank() -> None:
    found = row(ranks(1.2, (100, 200)), ranks(1.5, (90, 190)))
    assert (found["plain"], found["auto"], found["best"], found["peak"], found["miss"]) == (1.0, 1.2, 1.5, 1.0, "")


def test_a_peak_above_the_budget_of_any_rank_is_a_miss() -> None:
    assert row(ranks(1.2, (50, 202)), ranks(1.5, (90, 190)))["miss"] == "a peak is 1.0100 of the budget"


def test_a_layer_order_that_is_faster_within_all_budgets_is_a_miss() -> None:
    assert "of a LayerOrderPolicy" in row(ranks(1.2, (100, 200)), ranks(1.1, (90, 190)))["miss"]
    above = row(ranks(1.2, (100, 200)), ranks(1.1, (90, 201)))
    assert (above["miss"], above["best"]) == ("", None)


def test_a_job_that_failed_says_why() -> None:
    auto = [{"rank": 0, "error": "the budget of 1.0 GiB is below 2.0 GiB. More of that"}]
    assert row(auto, ranks(1.5, (90, 190)))["miss"] == "the budget of 1.0 GiB is below 2.0 GiB"

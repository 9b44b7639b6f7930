"""What the benchmark of trainings within a budget finds wrong with policy="auto"."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from benchmarks.recompute.__main__ import OVERLAPPED, UNBUDGETED, WAYS, below_table, misses, over_plain, table

pytestmark = pytest.mark.once(why="it needs no device")

GIB = 1 << 30
SIZE = "7b-8192"  # 34 GiB, and a goal of 1.05


def taken(forward: float, backward: float, gib: float, setting: str = "") -> dict[str, Any]:
    step = forward + backward + 1
    return {
        "forward": forward,
        "backward": backward,
        "optimizer": 1.0,
        "step": step,
        "peak": int(gib * GIB),
        "setting": setting,
    }


def rows(**changed: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """auto is the best of those within the budget."""
    return {
        "plain": taken(1, 2, 90),
        "full-best": taken(1, 2.5, 33, "first 20"),
        "selective": taken(1, 2.1, 34.01),
        "selective-best": {"error": "at least 34.0 GiB"},
        "auto": taken(1, 2.15, 34),
        "auto-backward": taken(1, 2.15, 34) | {"step": 3.2, "gradients": GIB // 4},
    } | changed


@pytest.mark.parametrize(
    ("changed", "miss"),
    [
        ({"auto": taken(1, 2.15, 34.34)}, "the peak of auto is 1.0100 of the budget"),
        ({"full-best": taken(1, 2.1, 33)}, "auto takes 1.012 of full-best"),
        ({"auto": taken(1, 2.16, 34)}, "forward and backward of auto take 1.053 of plain's; the goal is 1.05"),
        ({"auto": {"error": "34 GiB are too little. More"}}, "there is no plan for auto: 34 GiB are too little"),
        ({"auto-backward": taken(1, 2.2, 33)}, "auto-backward takes 1.012 of auto"),
        ({"auto-backward-host": taken(1, 1.1, 33)}, "auto-backward takes 1.032 of auto-backward-host"),
        ({"auto-backward": taken(1, 1.5, 34.34)}, "the peak of auto-backward is 1.0100 of the budget"),
    ],
)
def test_what_misses(changed: dict[str, dict[str, Any]], miss: str) -> None:
    assert list(misses(SIZE, rows(**changed))) == [miss]


def test_nothing_misses_where_auto_is_the_fastest() -> None:
    assert list(misses(SIZE, rows())) == []
    slow = rows(auto=taken(1, 2.4, 60))
    del slow["selective"]
    assert list(misses("13b-8192", slow)) == []  # which has no goal
    assert list(misses(SIZE, {"full": taken(1, 2, 9)})) == []  # nobody asked for auto


def test_the_table_has_a_row_for_each_way() -> None:
    assert table(SIZE, rows()).row_count == 6
    assert over_plain(taken(1, 2.3, 9), rows()) == pytest.approx(1.1)
    assert list(below_table(rows())) == [
        "GiB of gradients at once, at most: auto-backward 0.25",
        "selective-best: at least 34.0 GiB",
    ]


def test_the_table_fits_a_terminal() -> None:
    wide = rows(**{"selective-best": taken(5.4, 17.4, 100, "first 27")})
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table(SIZE, wide))
    printed = console.export_text()
    assert "selective-best, first 27   5.400   17.400 7.600  1.000 23.800 5.950 100.00   no" in printed
    assert "…" not in printed


def test_each_overlap_has_its_ways() -> None:
    assert "plain-backward" in UNBUDGETED
    assert "auto-backward" in OVERLAPPED
    assert "auto-backward-host" in WAYS
    assert len(WAYS) == len(set(WAYS))

"""What a drive has under way, and how fast it is found to be."""

from __future__ import annotations

import pytest

from tiered_mem.spill.pace import Pace


def moved(*operations: tuple[int, float, float]) -> Pace:
    """Operations of so many bytes each, from one time to another, in the order in which they ended."""
    pace = Pace()
    for nbytes, began, ended in operations:
        pace.begin(nbytes)
        pace.end(nbytes, nbytes, began, ended)
    return pace


def test_nothing_is_known_before_anything_has_ended() -> None:
    pace = Pace()
    pace.begin(100)
    assert (pace.rate, pace.under_way) == (None, 100)
    pace.give_up(60)
    assert (pace.rate, pace.under_way) == (None, 40)
    pace.end(40, 0, 1.0, 2.0)
    assert (pace.rate, pace.under_way) == (None, 0), "what failed at once tells no rate"


@pytest.mark.parametrize(
    "operations",
    [
        [(100, 1.0, 2.0), (300, 2.0, 5.0)],
        [(100, 1.0, 2.0), (100, 7.0, 8.0)],  # what lies between is no work
        [(200, 1.0, 3.0), (200, 1.0, 4.0), (100, 4.0, 6.0)],  # a second in which two go on is one
        [(100, 5.0, 6.0), (600, 0.0, 7.0)],  # the one that began first ends last
    ],
)
def test_a_rate_is_bytes_in_seconds_with_work(operations: list[tuple[int, float, float]]) -> None:
    assert moved(*operations).rate == pytest.approx(100, abs=1e-9)


@pytest.mark.parametrize("pause", [0.0, 1.0])
def test_a_rate_follows_a_drive_that_slows_down(pause: float) -> None:
    """As an SSD does whose cache is full: without a pause between operations, too."""
    fast = [(1000, n * (1 + pause), n * (1 + pause) + 1) for n in range(20)]
    start = fast[-1][2]
    slow = [(100, start + n * (1 + pause), start + n * (1 + pause) + 1) for n in range(20)]
    assert moved(*fast).rate == pytest.approx(1000)
    assert 100 <= (moved(*fast, *slow).rate or 0) < 200

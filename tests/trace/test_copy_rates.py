"""Rates of copies, from when each of them ran."""

from __future__ import annotations

import pytest

from tiered_mem.trace.rates import CopySpan, rates


def test_without_copies_nothing_is_known() -> None:
    assert rates([], []) == (0, 0, 0)


def test_copies_that_run_alone() -> None:
    out = [CopySpan(0, 1, 100), CopySpan(2, 3, 100)]
    assert rates(out, []) == (100, 0, 0)
    assert rates(out, [CopySpan(1, 2, 50)]) == (100, 50, 0)


def test_copies_beside_others_do_not_count_and_tell_the_share() -> None:
    out = [CopySpan(0, 1, 100), CopySpan(1, 3, 100)]
    back = [CopySpan(1, 3, 50), CopySpan(3, 4, 50)]
    assert rates(out, back) == (100, 50, 0.5)


def test_copies_that_are_beside_others_for_a_part_of_their_time() -> None:
    # From 2 to 3 both have half. What is left of the second then goes on alone.
    out = [CopySpan(0, 1, 100), CopySpan(1, 3, 150)]
    back = [CopySpan(2, 4, 75), CopySpan(4, 5, 50)]
    assert rates(out, back) == pytest.approx((100, 50, 0.5))


def test_one_copy_beside_many() -> None:
    out = [CopySpan(0, 10, 1000), CopySpan(10, 20, 600)]
    back = [CopySpan(11 + at, 11 + at + 0.8, 24) for at in range(8)] + [CopySpan(30, 31, 50)]
    found = rates(out, back)
    # 6.4 of the ten seconds were beside others.
    assert found[:2] == (100, 50)
    assert found[2] == pytest.approx((600 - 360 + 2 * 192) / (640 + 2 * 320), rel=1e-9)


def test_where_all_run_beside_others_a_rate_is_that_of_all() -> None:
    assert rates([CopySpan(0, 2, 100)], [CopySpan(0, 2, 50)]) == (50, 25, 0)


def test_few_bytes_tell_nothing() -> None:
    out = [CopySpan(0, 1, 5), CopySpan(1, 3, 100)]
    assert rates(out, [CopySpan(1, 3, 50)]) == (35, 25, 0)

"""What steps show of the link, and when plans follow it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.policies.planned import best, gpt, planned
from tests.policies.simulated.machine import Machine
from tiered_mem.policies.planning import Link
from tiered_mem.policies.planning.rates import Rates

MEASURED = Link(20e9, 10e9, both=0.9, latency=1e-6)


def seen(*steps: tuple[float, float, float]) -> list[tuple[bool, float, float, float]]:
    """After each measured step whether the link has changed, and its rates in GB/s and share."""
    rates = Rates(MEASURED)
    found = []
    for step in steps:
        changed = rates.see(*step)
        found.append((changed, rates.link.out / 1e9, rates.link.back / 1e9, rates.link.both))
    return found


def test_the_first_step_is_followed_at_once() -> None:
    assert seen((5e9, 4e9, 0.5)) == [(True, 5, 4, 0.5)]


def test_what_is_not_known_or_hardly_different_stays() -> None:
    assert seen((0, 0, 0), (20.5e9, 9.8e9, 0.8)) == [(False, 20, 10, 0.9)] * 2


def test_latency_and_drive_stay() -> None:
    drive = Link(2e9, 1e9)
    rates = Rates(replace(MEASURED, drive=drive))
    rates.see(5e9, 4e9, 0.5)
    assert rates.link == Link(5e9, 4e9, both=0.5, latency=1e-6, drive=drive)


def test_until_two_agree_each_step_is_followed() -> None:
    assert seen((5e9, 0, 0), (6e9, 0, 0), (7e9, 0, 0))[-1] == (True, 7, 10, 0.9)


def test_after_two_agree_one_odd_step_changes_nothing() -> None:
    steps = seen((5e9, 4e9, 0), (5.1e9, 4e9, 0), (9e9, 4e9, 0), (5e9, 4e9, 0), (9e9, 4e9, 0), (12e9, 4e9, 0))
    assert [changed for changed, *_ in steps] == [True] + [False] * 5
    assert steps[-1] == (False, 5, 4, 0.9)


def test_after_two_agree_two_others_change_it() -> None:
    steps = seen((5e9, 4e9, 0), (5e9, 4e9, 0), (9e9, 4e9, 0), (9.1e9, 4e9, 0), (5e9, 4e9, 0))
    assert [changed for changed, *_ in steps] == [True, False, False, True, False]
    assert steps[-1] == (False, 9.1, 4, 0.9)


def test_directions_are_confirmed_each_by_itself() -> None:
    steps = seen((5e9, 4e9, 0), (5e9, 3e9, 0), (8e9, 3e9, 0))
    assert [changed for changed, *_ in steps] == [True, True, False]


def test_a_doubted_rate_is_decided_by_the_next_measured_step() -> None:
    rates = Rates(MEASURED)
    for doubted, out in ((False, 20e9), (True, 5e9), (False, 20e9), (True, 5e9), (False, 5e9)):
        rates.see(out, 0, 0)
        assert rates.doubted is doubted


def test_the_second_step_is_planned_for_the_rates_of_the_first() -> None:
    """They were told five times what there is, as a rank that measures alone."""
    step, slow = gpt(layers=12), Link(20e9, 20e9)
    policy, budget = planned(step, 0.35, Link(100e9, 100e9))
    machine = Machine(policy, slow)
    machine.run(step)
    assert machine.run(step).seconds == pytest.approx(best(step, budget, slow), rel=0.02)


@pytest.mark.parametrize("odd", [Link(5e9, 5e9), Link(100e9, 100e9)], ids=["slower", "faster"])
def test_one_odd_step_makes_no_plan(odd: Link) -> None:
    step, usual = gpt(layers=12), Link(20e9, 20e9)
    policy, _ = planned(step, 0.35, usual)
    machine = Machine(policy, usual)
    for _ in range(3):
        machine.run(step)
    before = machine.run(step).seconds
    link = policy._repertoire.link
    # At least one of four is measured, and the one after it too, where that one was odd.
    for _ in range(2):
        machine.link = odd
        machine.run(step)
        machine.link = usual
        for _ in range(6):
            last = machine.run(step).seconds
        assert policy._repertoire.link == link
        assert last == pytest.approx(before, rel=0.01)

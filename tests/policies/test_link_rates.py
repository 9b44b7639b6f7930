"""What steps show of the link, and when plans follow it."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.policies.planned import best, gpt, planned
from tests.policies.simulated.machine import Machine
from tiered_mem.policies.base import StepMeasured
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


def test_a_link_that_never_shows_the_same_is_not_doubted_for_ever() -> None:
    generator, rates = random.Random(1), Rates(MEASURED)
    rates.see(20e9, 10e9, 0.9)
    told = [(rates.see(generator.uniform(16e9, 24e9), 0, 0), rates.doubted) for _ in range(100)]
    for first, second in pairwise(told):
        assert not (first[1] and second[1])  # who is doubted is decided by the next
    assert not any(changed or doubted for changed, doubted in told[50:])
    assert not rates.see(5e9, 0, 0)
    assert rates.see(5.2e9, 0, 0)


def test_until_two_agree_alike_is_less_and_less() -> None:
    rates = Rates(MEASURED)
    assert [rates.see(out * 1e9, 0, 0) for out in (5, 6, 7, 6.5)] == [True, True, True, False]


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


def test_no_more_steps_are_timed_for_a_link_that_nothing_waits_for() -> None:
    step, usual = gpt(layers=12), Link(20e9, 20e9)
    policy, _ = planned(step, 0.7, usual)
    machine = Machine(policy, usual)
    for _ in range(5):
        machine.run(step)
    timed = 0
    for n in range(64):
        machine.link = Link(*[(21e9, 19e9, 18e9)[n % 3]] * 2)
        timed += StepMeasured in policy.asks
        machine.run(step)
    assert timed == 5

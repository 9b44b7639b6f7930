"""What is said of steps above the budget."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from tests.policies.planned import gpt
from tests.policies.simulated.machine import Machine
from tests.policies.simulated.random_steps import LINK, MIB
from tests.policies.simulated.steps import Compute, Use, profile
from tests.policies.simulated.strange_steps import twice
from tiered_mem.policies import ForwardBegin, ForwardEnd, LayerBegin, LayerEnd, PlannedPolicy
from tiered_mem.policies.base import Memory, Recomputed, StepBegin, StepEnd
from tiered_mem.policies.planning import BudgetTooSmall
from tiered_mem.policies.planning.report import Overrun, OverrunCause, Overruns
from tiered_mem.sizes import format_bytes

OVERRUN = Overrun(7, 120 * MIB, 100 * MIB, OverrunCause.NOTHING, 5 * MIB, {"in tensors below min_bytes": 64 * MIB})


def test_it_has_the_numbers_and_what_helps() -> None:
    told = str(OVERRUN)
    assert "step 7 took 120.0 MiB of the device, 20.0 MiB more than the budget of 100.0 MiB" in told
    assert "5.0 MiB of it were in blocks, which can move, and 115.0 MiB were not" in told
    assert "its layers saved 64.0 MiB in tensors below min_bytes" in told
    assert "What helps: 20.0 MiB of budget more; " in told


def test_each_cause_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    overruns = Overruns()
    with caplog.at_level(logging.WARNING, "tiered_mem.policies"):
        for cause in (*OverrunCause, *OverrunCause):
            overruns.see(replace(OVERRUN, cause=cause))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == len(OverrunCause)
    assert all(cause.value in told for cause, told in zip(OverrunCause, said, strict=True))


def test_twice_as_much_is_said_again_and_all_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    overruns = Overruns()
    with caplog.at_level(logging.WARNING, "tiered_mem.policies"):
        for over in (20, 30, 40, 70, 80, 10):
            overruns.see(replace(OVERRUN, peak=(100 + over) * MIB))
    said = [record.getMessage() for record in caplog.records]
    assert [f"{over}.0 MiB more than" in told for over, told in zip((20, 40, 80), said, strict=True)] == [True] * 3
    assert (overruns.steps, overruns.most) == (6, 180 * MIB)


def test_a_report_counts_them() -> None:
    machine = Machine(PlannedPolicy(budget := max(profile(gpt(layers=4)).moments.full) + MIB, LINK), LINK)
    for more in (0, 0, 2 * budget, 0):
        step = gpt(layers=4)
        step.code += [Compute(0.0, more)] if more else []
        machine.run(step)
    report = machine.policy.report()
    assert report.steps_over == 1
    assert report.most_over >= 2 * budget
    assert (
        f"over     one step until now took more than the budget, {format_bytes(report.most_over)} at most"
        in str(report)
    )


def test_what_is_registered_is_not_advised_to_be() -> None:
    after = replace(OVERRUN, cause=OverrunCause.AFTER)
    assert "register_optimizer" in str(after)
    assert "register_optimizer" not in str(replace(after, registered=True))


@pytest.mark.parametrize("last", [False, True])
def test_a_peak_in_a_second_backward_is_not_after_it(last: bool, caplog: pytest.LogCaptureFixture) -> None:
    """last: whether it comes after the last use, as in the optimizer's step."""
    step = twice(gpt(layers=4))
    budget = max(profile(gpt(layers=4)).moments.full) + MIB
    uses = [place for place, each in enumerate(step.code) if isinstance(each, Use)]
    step.code.insert(len(step.code) if last else uses[-2], Compute(0.0, 2 * budget))
    machine = Machine(PlannedPolicy(budget, LINK), LINK)
    with caplog.at_level(logging.WARNING, "tiered_mem.policies"), pytest.raises(BudgetTooSmall):
        machine.run(step)
    expected, other = OverrunCause.AFTER, OverrunCause.NEW
    if not last:
        expected, other = other, expected
    assert (expected.value in caplog.text, other.value in caplog.text) == (True, False)


def test_a_step_with_a_trial_is_not_told_of_small_tensors(caplog: pytest.LogCaptureFixture) -> None:
    """A trial is in each step whose shapes are new, and each of these is above a budget that nothing can keep."""
    policy = PlannedPolicy(MIB, LINK)
    memory = Memory(2 * MIB, 2 * MIB, 2 * MIB)
    with caplog.at_level(logging.WARNING, "tiered_mem.policies"):
        for step in range(2):
            events = [ForwardBegin(step, 1), LayerBegin(step, 0), LayerEnd(step, 0), ForwardEnd(step)]
            trial = Recomputed(step, 0, trial=True, results=0, unsaved=0)
            for event in (StepBegin(step), *events[:3], trial, *events[3:], StepEnd(step)):
                policy.decide(memory)
                policy.decide(event)
    assert OverrunCause.NOTHING.value in caplog.text
    assert OverrunCause.SMALL.value not in caplog.text

"""What leaves the device has to find room: plans, choices and trials where there is little of it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tests.policies.planned import gpt
from tests.policies.simulated.machine import Machine
from tests.policies.simulated.random_steps import KINDS, LINK, MIB
from tests.policies.simulated.steps import budget_between, profile
from tests.policies.simulated.treated import decoder
from tests.policies.test_treatments import Training
from tiered_mem.policies import PlannedPolicy
from tiered_mem.policies.planning import BudgetTooSmall, Link, Plan, Profile, plan
from tiered_mem.policies.planning.report import Overrun, OverrunCause
from tiered_mem.sizes import format_bytes

SHARES = (1.0, 0.95, 0.7, 0.3, 0.0)


def away(step: Profile, made: Plan) -> int:
    """The most bytes of blocks that a plan has away at once, each from its copy out to its use."""
    return max(
        sum(step.nbytes[b] for b in made.release if made.early.get(b, step.saved[b]) <= k < step.used[b])
        for k in range(len(step.seconds))
    )


def planned(step: Profile, budget: int, room: int) -> Plan | BudgetTooSmall:
    try:
        return plan(step, budget, replace(LINK, room=room))
    except BudgetTooSmall as error:
        return error


@pytest.mark.parametrize("kind", KINDS)
def test_no_plan_has_more_away_than_there_is_room_for(kind: str) -> None:
    found = 0
    for seed, within in itertools.product(range(12), (0.1, 0.4, 0.8)):
        step = profile(KINDS[kind](seed))
        budget = budget_between(step, within)
        free = plan(step, budget, LINK)
        least = max(step.full) - budget  # has to be away where most is there
        assert free.below == away(step, free) >= least
        for share in SHARES:
            room = int(share * free.below)
            made = planned(step, budget, room)
            if isinstance(made, Plan):
                found += 1
                assert made.below == away(step, made) <= room
                assert made.peak <= budget
                assert room >= least
            else:
                assert made.floor - budget >= least - room
                assert 0 < made.without_room <= made.floor
    assert found > 36


def test_the_room_has_to_be_a_size() -> None:
    with pytest.raises(ValueError, match="room for 0 bytes or more, not -1"):
        Link(1e9, 1e9, room=-1)


def test_a_step_above_the_budget_says_what_found_no_room() -> None:
    overrun = Overrun(7, 120 * MIB, 100 * MIB, OverrunCause.PLANNED, 64 * MIB, {}, without_room=20 * MIB)
    assert "64.0 MiB of it were in blocks" in str(overrun)
    assert "20.0 MiB of the blocks found no room on the host. What helps: 20.0 MiB of budget more; " in str(overrun)
    assert str(overrun).endswith("a larger host_bytes, or a spill_dir")


@pytest.mark.parametrize("recompute", [False, True])
def test_a_plan_that_finds_no_room_is_made_all_the_same(recompute: bool) -> None:
    """Where nothing else can be done. What helps is told."""
    step = gpt(layers=6)
    budget = budget_between(profile(step), 0.5)
    lacking = max(profile(step).full) - budget
    machine = Machine(PlannedPolicy(budget, LINK, recompute=recompute), LINK, host=lacking // 2)
    outcomes = [machine.run(step) for _ in range(6)]
    assert {outcome.peak > budget for outcome in outcomes} == {True}
    assert max(outcome.peak for outcome in outcomes) < max(profile(step).full)
    report = machine.policy.report()
    assert report.steps_over == 6
    assert f"{format_bytes(max(outcome.peak for outcome in outcomes) - budget)} more of host_bytes" in str(report)
    assert ('TieringManager(recompute="auto")' in str(report)) is not recompute


def test_a_host_that_grows_is_used() -> None:
    step = gpt(layers=6)
    budget = budget_between(profile(step), 0.5)
    lacking = max(profile(step).full) - budget
    host = [lacking // 2]
    policy = PlannedPolicy(budget, LINK, recompute=False, host_bytes=lambda: host[0])
    machine = Machine(policy, LINK, host=host[0])
    assert min(machine.run(step).peak for _ in range(6)) > budget
    host[0] = machine.host = 4 * lacking
    peaks = [machine.run(step).peak for _ in range(20)]
    assert max(peaks[-2:]) <= budget
    assert "host_bytes" not in str(policy.report())


def test_layers_are_computed_again_once_the_host_has_less_room() -> None:
    training = Training(decoder(8), 0.5, link=Link(1e12, 1e12))
    full = max(training.model.recorded().profile.full)
    assert max(training.step().peak for _ in range(20)) <= training.budget
    assert training.treated == [{}] * 20, "nothing waits"
    training.machine.host = (full - training.budget) // 2
    peaks = [training.step().peak for _ in range(24)]
    assert training.budget < max(peaks) <= full
    assert max(peaks[-12:]) <= training.budget
    assert training.treated[-1]

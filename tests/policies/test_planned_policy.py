"""PlannedPolicy learns a step, plays its plan, and keeps the budget where steps are not as planned."""

from __future__ import annotations

import contextlib
import math
import random
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import pytest

from tests.policies.contract import check_policy
from tests.policies.planned import best, gpt, planned
from tests.policies.simulated.machine import Machine, Outcome
from tests.policies.simulated.random_steps import KINDS, LINK, MIB
from tests.policies.simulated.steps import (
    Allocate,
    Drop,
    Save,
    Use,
    budget_between,
    profile,
)
from tiered_mem.policies import (
    Action,
    Event,
    Fetch,
    HostPressure,
    LayerBegin,
    Offload,
    PlannedPolicy,
    Policy,
    Release,
    Reload,
    Spill,
)
from tiered_mem.policies.actions import Advice
from tiered_mem.policies.base import ExactMemory, Memory, StepBegin, StepEnd, StepMeasured, Used
from tiered_mem.policies.planning import BudgetTooSmall, Link, plan
from tiered_mem.policies.planning.profile import floor


def moved(outcome: Outcome) -> list[str]:
    return [
        f"{type(event).__name__} {' '.join(f'{type(each).__name__}({each.key})' for each in answer)}"
        for event, answer in outcome.log
        if answer
    ]


def test_the_contract() -> None:
    check_policy(lambda: PlannedPolicy(64, LINK))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_after_one_step_it_plays_the_plan_that_full_knowledge_would_make(kind: str, seed: int) -> None:
    step = KINDS[kind](seed)
    policy, budget = planned(step, 0.4)
    machine = Machine(policy, LINK)
    assert machine.run(step).peak <= max(budget, max(profile(step).moments.full))
    for _ in range(3):
        outcome = machine.run(step)
        assert outcome.peak <= budget
        assert outcome.on_demand == 0
        assert outcome.seconds == pytest.approx(best(step, budget), rel=5e-3)
    assert machine.blocks == {}


def test_the_answers_of_a_planned_step() -> None:
    step = gpt(layers=3)
    machine = Machine(planned(step, 0.5)[0], LINK)
    machine.run(step)
    assert moved(machine.run(step)) == [
        "Saved Offload(9)",
        "Saved Offload(10)",
        "Saved Offload(11)",
        "Saved Offload(13)",
        "Saved Release(10)",
        "Saved Release(11)",
        "Saved Release(9)",
        "Saved Release(13)",
        "Used Reload(13)",
        "Used Reload(11)",
        "LayerBegin Reload(10)",
        "Used Reload(9)",
    ]


def test_where_everything_fits_nothing_moves() -> None:
    step = gpt()
    full = max(profile(step).moments.full)
    machine = Machine(PlannedPolicy(full, LINK), LINK)
    machine.run(step)
    assert moved(machine.run(step)) == []
    machine = Machine(PlannedPolicy(5 * full, LINK), LINK)
    assert moved(machine.run(step)) == []


@pytest.mark.parametrize(
    ("found", "beyond", "left_out"), [(1, 0, 200), (150, 0, 250), (150, 180, 70), (1, 180, 20), (150, 300, 0)]
)
def test_what_lies_unused_in_the_pool_is_measured_and_left_out(found: int, beyond: int, left_out: int) -> None:
    """As far as the device has no room for it beyond the budget."""
    step = gpt(layers=12)
    budget = budget_between(profile(step), 0.4)
    policy = PlannedPolicy(budget + left_out * MIB, LINK, fragments=200 * MIB, beyond=beyond * MIB)
    machine = Machine(policy, LINK, fragments=found * MIB)
    machine.run(step)
    outcome = machine.run(step)
    assert outcome.peak == plan(profile(step), budget, LINK).peak


def test_without_a_number_what_ran_once_goes_on() -> None:
    """The floor is within what the device has, and fragments would not leave as much."""
    step = gpt()
    least = floor(profile(step).moments)
    machine = Machine(PlannedPolicy(least + MIB, LINK, fragments=20 * MIB), LINK)
    machine.run(step)
    assert machine.run(step).peak == least
    with pytest.raises(BudgetTooSmall):
        Machine(PlannedPolicy(least - MIB, LINK, fragments=20 * MIB), LINK).run(step)


class Tensors(set[int]):
    """Something that a function has."""


@pytest.mark.usefixtures("no_gc")
def test_an_error_keeps_nothing_of_what_was_under_way() -> None:
    """Whoever goes on after it would otherwise keep the tensors of that step until Python next collects garbage."""
    step = gpt()
    machine = Machine(PlannedPolicy(floor(profile(step).moments) - MIB, LINK), LINK)

    def caller() -> weakref.ref[set[int]]:
        local = Tensors()
        with contextlib.suppress(BudgetTooSmall):
            machine.run(step)
            raise AssertionError("the budget is enough")
        return weakref.ref(local)

    assert caller()() is None


def test_it_asks_for_times_until_it_knows_a_step_and_now_and_then() -> None:
    step = gpt()
    policy, _ = planned(step)
    machine = Machine(policy, LINK)
    asked = []
    exact = []
    for _ in range(60):
        asked.append(StepMeasured in policy.asks)
        exact.append(ExactMemory in policy.asks)
        machine.run(step)
    # Less and less, as nothing waits.
    assert [n for n, each in enumerate(asked) if each] == [0, 4, 8, 16, 32, 48]
    assert exact == [True] + 59 * [False]
    assert {Used, Memory, StepBegin, StepEnd} < set(policy.asks)


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_other_lengths_are_planned_for_by_their_ratio(noise: float) -> None:
    step = gpt(layers=10, size=100 * MIB)
    policy, budget = planned(step)
    machine = Machine(policy, LINK, noise=noise)
    machine.run(step)
    rng = random.Random(0)
    for _ in range(8):
        other = step.scaled(rng.uniform(0.4, 1.0))
        outcome = machine.run(other)
        assert outcome.peak <= budget * 1.01
        assert outcome.seconds <= best(other, budget) * 1.05


def test_steps_with_other_events_are_recorded_and_the_last_eight_kinds_are_kept() -> None:
    kinds = [gpt(layers=n) for n in range(4, 13)]
    budget = budget_between(profile(kinds[-1]), 0.3)
    policy = PlannedPolicy(budget, LINK)
    machine = Machine(policy, LINK)
    for step in kinds:
        machine.run(step)
        assert ExactMemory not in policy.asks
        outcome = machine.run(step)
        assert outcome.peak <= budget
        assert outcome.seconds == pytest.approx(best(step, budget), rel=5e-3)
    for step in kinds[1:]:
        assert machine.run(step).seconds == pytest.approx(best(step, budget), rel=5e-3)
    # The first is forgotten, and learned again.
    assert machine.run(kinds[0]).seconds > 1.1 * best(kinds[0], budget)
    assert machine.run(kinds[0]).seconds == pytest.approx(best(kinds[0], budget), rel=5e-3)


def test_a_step_that_shows_later_that_it_is_another_kind() -> None:
    """Both have as many layers and the same first block."""
    plain, wide = gpt(), gpt()
    wide.blocks[4:] = [replace(block, nbytes=2 * block.nbytes) for block in wide.blocks[4:]]
    wide.code.insert(1, LayerBegin(0, 0))
    budget = budget_between(profile(wide), 0.3)
    machine = Machine(PlannedPolicy(budget, LINK), LINK)
    for step in (plain, plain, wide, wide):
        machine.run(step)
    for step in (plain, wide, wide, plain):
        outcome = machine.run(step)
        assert outcome.peak <= budget
        assert outcome.seconds <= best(step, budget) * 1.1


class Pressed(Policy):
    """A policy that is asked for room on the host when the first backward of a step begins."""

    def __init__(self, policy: PlannedPolicy) -> None:
        self._policy = policy
        self.follow = policy.follow
        self.answers: list[Sequence[Action]] = []
        self.act: Callable[[Sequence[Action]], None]

    @property
    def asks(self) -> Collection[type[Event]]:
        return self._policy.asks

    def decide(self, event: Event) -> Sequence[Action]:
        if isinstance(event, LayerBegin) and event.backward and not self.answers:
            for nbytes in (100 * MIB, 1 << 40, 1 << 40):
                self.answers.append(self._policy.decide(HostPressure(nbytes)))
                self.act(self.answers[-1])
        return self._policy.decide(event)


def test_under_host_pressure_what_is_needed_last_is_spilled_and_fetched_before_its_reload() -> None:
    step = gpt()
    policy = Pressed(planned(step, 0.2)[0])
    machine = Machine(policy, LINK)
    policy.act = machine.act
    machine.run(step)
    policy.answers.clear()
    outcome = machine.run(step)
    first, everything, nothing = policy.answers
    assert first == [Spill(18), Spill(19)]  # saved first, and so used last
    assert len([each for each in everything if isinstance(each, Spill)]) > 5
    assert nothing == []
    spilled = {each.key for each in (*first, *everything) if isinstance(each, Spill)}
    later = [each for _, answer in outcome.log for each in answer]
    begun = later.index(next(each for each in later if isinstance(each, Fetch)))
    for key in spilled - {each.key for each in later[:begun] if isinstance(each, Reload)}:
        assert later.index(Fetch(key)) < later.index(Reload(key))
    assert machine.blocks == {}


def test_with_a_drive_spills_and_fetches_are_planned() -> None:
    step = gpt(layers=10)
    budget = budget_between(profile(step), 0.2)
    link = replace(LINK, drive=Link(20e9, 20e9))
    policy = PlannedPolicy(budget, link, host_bytes=512 * MIB)
    machine = Machine(policy, link)
    machine.run(step)
    outcome = machine.run(step)
    answers = [each for _, answer in outcome.log for each in answer]
    spilled = [each.key for each in answers if isinstance(each, Spill)]
    assert spilled
    for key in spilled:
        kinds = [type(each) for each in answers if each.key == key]
        assert kinds == [Offload, Spill, Release, Fetch, Reload]


def test_optimizer_states_have_what_a_step_leaves_them_and_leave_for_a_longer_one() -> None:
    step = gpt()
    full = max(profile(step).moments.full)
    slow = Link(1e9, 1e9)  # activations that leave are waited for twice, and states that leave once
    policy, kept = PlannedPolicy(full + 200 * MIB, slow), 200 * MIB
    policy.states.total = kept
    machine = Machine(policy, slow)
    machine.run(step)
    machine.run(step)
    assert policy.states.target == kept
    policy.states.kept = kept
    machine.allocate(kept)
    outcome = machine.run(step)
    assert outcome.peak == full + kept
    assert moved(outcome) == []
    surprising = replace(step, code=[*step.code])
    surprising.code.insert(1, Allocate(100 * MIB))
    surprising.code.append(Allocate(-100 * MIB))
    assert machine.run(surprising).peak <= full + kept
    machine.run(step.scaled(2.0))
    assert policy.states.target < kept


def test_what_was_recorded_before_optimizer_states_move_beside_the_step_is_forgotten() -> None:
    """Their window, and gradients that wait, were not there then."""

    class Settles(PlannedPolicy):
        """The first step of the optimizer shows how the next ones are made."""

        def decide(self, event: Event) -> Sequence[Advice]:
            self.states.settled |= isinstance(event, StepEnd)
            return super().decide(event)

    step = gpt()
    policy = Settles(budget_between(profile(step), 0.4), LINK, recompute=False)
    policy.states.settled = False
    machine = Machine(policy, LINK)
    recorded = []
    for _ in range(4):
        recorded.append(ExactMemory in policy.asks)
        machine.run(step)
    assert recorded == [True, True, False, False]
    assert policy.report().planned is not None


def test_a_slowdown_saves_memory() -> None:
    step = gpt(layers=12)
    full = max(profile(step).moments.full)
    fastest = step.compute
    slow = Link(20e9, 20e9)
    peaks = []
    for slowdown in (0.0, 0.1, 0.3):
        machine = Machine(PlannedPolicy(full, slow, slowdown=slowdown), slow)
        machine.run(step)
        outcome = machine.run(step)
        peaks.append(outcome.peak)
        assert outcome.seconds <= fastest * (1 + slowdown) * 1.01
    assert full > peaks[0] > peaks[1] > peaks[2]


@pytest.mark.parametrize(("budget", "slowdown"), [(0, None), ("much", None), (1, -0.1), (1, math.nan)])
def test_wrong_arguments_are_refused(budget: int | str, slowdown: float | None) -> None:
    with pytest.raises(ValueError, match=r"size|slowdown"):
        PlannedPolicy(budget, LINK, slowdown=slowdown)


def test_the_steps_of_the_machine_are_those_that_are_planned_for() -> None:
    """Each save has a use and a drop, or the tests above would prove little."""
    for make in KINDS.values():
        step = make(2)
        for kind in (Save, Use, Drop):
            assert {each.block for each in step.code if isinstance(each, kind)} == set(range(len(step.blocks)))

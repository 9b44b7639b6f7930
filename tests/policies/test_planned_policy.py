"""PlannedPolicy learns a step, plays its plan, and keeps the budget where steps are not as planned."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain, pairwise

import pytest

from tests.policies.contract import check_policy
from tests.policies.events import saved, tell
from tests.policies.simulated.machine import Machine, Outcome, Place, backwards
from tests.policies.simulated.random_steps import KINDS, LINK, MIB
from tests.policies.simulated.steps import (
    Allocate,
    Compute,
    Drop,
    Op,
    Save,
    Step,
    Use,
    budget_between,
    build,
    profile,
)
from tiered_mem.policies import (
    Action,
    Event,
    ExactMemory,
    Fetch,
    HostPressure,
    LayerBegin,
    LayerEnd,
    Memory,
    Offload,
    PlannedPolicy,
    Release,
    Reload,
    Spill,
    StepBegin,
    StepEnd,
    StepMeasured,
    Used,
)
from tiered_mem.policies.planning import BudgetTooSmall, Link, plan
from tiered_mem.policies.planning.bound import floor


def gpt(layers: int = 6, size: int = 64 * MIB, seconds: float = 2e-3) -> Step:
    """Layers of three equal blocks each."""
    layer = [Op((seconds, 2 * seconds), [size], (size, size)) for _ in range(3)]
    return build([layer] * layers, [8 * MIB] * layers)


def planned(step: Step, share: float = 0.4, link: Link = LINK) -> tuple[PlannedPolicy, int]:
    budget = budget_between(profile(step), share)
    return PlannedPolicy(budget, link), budget


def best(step: Step, budget: int, link: Link = LINK) -> float:
    """The seconds of a plan that is made with all knowledge."""
    return plan(profile(step), budget, link).seconds


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


@pytest.mark.parametrize(("found", "left_out"), [(0, 100), (150, 150), (10_000, 400)])
def test_what_lies_unused_in_the_pool_is_measured_and_left_out(found: int, left_out: int) -> None:
    step = gpt(layers=12, size=16 * MIB)
    budget = budget_between(profile(step), 0.4)
    given = budget + left_out * MIB
    machine = Machine(PlannedPolicy(given, LINK, fragments=200 * MIB), LINK, fragments=found * MIB)
    machine.run(step)
    outcome = machine.run(step)
    assert outcome.peak == plan(profile(step), budget, LINK).peak


def test_without_a_number_what_ran_once_goes_on() -> None:
    """The floor is within what the device has, and fragments would not leave as much."""
    step = gpt()
    least = floor(profile(step).moments)[0]
    machine = Machine(PlannedPolicy(least + MIB, LINK, fragments=20 * MIB), LINK)
    machine.run(step)
    assert machine.run(step).peak == least
    with pytest.raises(BudgetTooSmall):
        Machine(PlannedPolicy(least - MIB, LINK, fragments=20 * MIB), LINK).run(step)


def test_it_asks_for_times_until_it_knows_a_step_and_now_and_then() -> None:
    step = gpt()
    policy, _ = planned(step)
    machine = Machine(policy, LINK)
    asked = []
    exact = []
    for _ in range(10):
        asked.append(StepMeasured in policy.asks)
        exact.append(ExactMemory in policy.asks)
        machine.run(step)
    assert asked == [True, False, False, False, True, False, False, False, True, False]
    assert exact == [True] + 9 * [False]
    assert {Used, Memory, StepBegin, StepEnd} < set(policy.asks)


def test_a_budget_below_the_floor_names_the_event() -> None:
    step = gpt()
    step.code.insert(backwards(step)[2] + 1, Compute(1e-3, 600 * MIB))
    machine = Machine(PlannedPolicy(500 * MIB, LINK), LINK)
    with pytest.raises(
        BudgetTooSmall, match=r"backward of layer 3 of graph 0, where 616\.0 MiB cannot move"
    ) as caught:
        machine.run(step)
    assert caught.value.floor > 600 * MIB


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


def test_a_longer_step_that_cannot_keep_the_budget_is_warned_of_and_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    step = gpt()
    policy, budget = planned(step, 0.1)
    machine = Machine(policy, LINK)
    machine.run(step)
    with caplog.at_level(logging.WARNING, "tiered_mem.policies"):
        machine.run(step.scaled(2.0))
    assert "2.00 times the recorded size may run out of memory: the budget of" in caplog.text
    assert machine.run(step).peak <= budget


def test_steps_with_other_events_are_recorded_and_the_last_four_kinds_are_kept() -> None:
    kinds = [gpt(layers=n) for n in (4, 5, 6, 7, 8)]
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


def test_a_link_that_becomes_slower_is_planned_for() -> None:
    step = gpt(layers=12)
    fast = replace(LINK, out=100e9, back=100e9)
    policy, budget = planned(step, 0.35, fast)
    machine = Machine(policy, fast)
    for _ in range(3):
        machine.run(step)
    machine.link = slow = Link(20e9, 20e9)
    seconds = [machine.run(step).seconds for _ in range(10)]
    assert seconds[-1] <= best(step, budget, slow) * 1.02
    assert len({round(each, 6) for each in seconds[4:8]}) == 1  # not more often than at each fourth step


def test_the_first_step_keeps_the_budget_while_others_take_more_and_more() -> None:
    step = gpt(layers=12)
    for place in reversed([place for place, each in enumerate(step.code) if isinstance(each, LayerEnd)]):
        step.code.insert(place, Allocate(50 * MIB))
    step.code.append(Allocate(-12 * 50 * MIB))
    budget = 1000 * MIB
    machine = Machine(PlannedPolicy(budget, LINK), LINK)
    assert machine.run(step).peak <= budget + 64 * MIB


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_memory_of_others_that_was_not_there_in_the_recorded_step_is_made_room_for(share: float) -> None:
    step = gpt(layers=12)
    policy, budget = planned(step, share)
    machine = Machine(policy, LINK)
    machine.run(step)
    machine.run(step)
    machine.allocate(150 * MIB)
    outcome = machine.run(step)
    assert outcome.peak <= budget
    assert machine.blocks == {}
    machine.allocate(-150 * MIB)
    assert machine.run(step).seconds == pytest.approx(best(step, budget), rel=0.05)


def test_steps_above_the_budget_are_planned_with_a_margin(caplog: pytest.LogCaptureFixture) -> None:
    step = gpt(layers=12)
    policy, budget = planned(step, 0.4)
    machine = Machine(policy, LINK)
    machine.run(step)
    before = machine.run(step)
    worse = Step(step.blocks, list(step.code))
    peak = next(place for place, each in enumerate(step.code) if isinstance(each, LayerBegin) and each.backward)
    worse.code.insert(peak + 2, Compute(0.0, budget))  # so much at once that nothing can be done
    with caplog.at_level(logging.WARNING, "tiered_mem.policies"):
        for _ in range(3):
            assert machine.run(worse).peak > budget
    assert "for the 3. time" in caplog.text
    assert machine.run(step).peak <= before.peak - 0.02 * budget


def test_an_exception_in_the_middle_of_a_step_leaves_nothing_behind() -> None:
    step = gpt()
    policy, budget = planned(step)
    machine = Machine(policy, LINK)
    for stop in range(5, len(step.code), 7):
        machine.run(step, lost=range(stop, len(step.code)))
        for key in list(machine.blocks):
            machine.drop(key)
        machine.allocate(-machine.level)
    machine.run(step)
    for _ in range(2):
        outcome = machine.run(step)
        assert outcome.peak <= budget
        assert outcome.seconds == pytest.approx(best(step, budget), rel=5e-3)


def twice(step: Step) -> Step:
    """The step with a second backward over the same blocks, as with retain_graph=True."""
    first = backwards(step)[0]
    again = [each for each in step.code[first:] if not isinstance(each, Drop | Allocate)]
    return Step(step.blocks, step.code[:first] + again + step.code[first:])


def test_a_second_backward_over_the_same_blocks() -> None:
    step = gpt()
    policy, budget = planned(step)
    machine = Machine(policy, LINK)
    machine.run(step)
    for other in (twice(step), twice(step), step, twice(step)):
        outcome = machine.run(other)
        assert outcome.peak <= budget + step.blocks[0].nbytes
        assert machine.blocks == {}


def test_a_backward_in_another_order() -> None:
    step = gpt()
    policy, budget = planned(step)
    machine = Machine(policy, LINK)
    machine.run(step)
    places = [*backwards(step), len(step.code)]
    parts = [step.code[a:z] for a, z in pairwise(places)]
    random.Random(1).shuffle(parts)
    other = Step(step.blocks, [*step.code[: places[0]], *chain.from_iterable(parts)])
    for _ in range(2):
        assert machine.run(other).peak <= budget + max(block.nbytes for block in step.blocks)
        assert machine.blocks == {}
    machine.run(step)  # taken for the other one until its backward begins
    assert machine.run(step).seconds == pytest.approx(best(step, budget), rel=5e-3)


def test_blocks_that_outlive_their_step_are_not_forgotten() -> None:
    step = gpt()
    policy, budget = planned(step)
    machine = Machine(policy, LINK)
    machine.run(step)
    keep = [place for place, each in enumerate(step.code) if isinstance(each, Drop) and each.block < 2]
    machine.run(step, lost=keep)
    assert len(machine.blocks) == 2
    assert machine.run(step).peak <= budget
    for key in list(machine.blocks):
        machine.use(key)
        assert machine.blocks[key].place in (Place.DEVICE, Place.LEAVING)
        machine.drop(key)
    assert machine.run(step).peak <= budget


def test_reloads_that_find_the_device_full_come_when_they_are_needed() -> None:
    step = gpt()
    policy, budget = planned(step)
    machine = Machine(policy, LINK, capacity=budget // 2)
    for _ in range(4):
        assert machine.run(step).peak <= budget
    assert machine.outcome.on_demand > 0
    assert machine.blocks == {}


def test_blocks_that_the_host_has_no_room_for_stay() -> None:
    step = gpt()
    policy, _ = planned(step)
    machine = Machine(policy, LINK, host=100 * MIB)
    for _ in range(4):
        machine.run(step)
    assert machine.on_host == 0
    assert machine.blocks == {}


class Pressed:
    """A policy that is asked for room on the host when the first backward of a step begins."""

    def __init__(self, policy: PlannedPolicy) -> None:
        self._policy = policy
        self.answers: list[Sequence[Action]] = []

    @property
    def asks(self) -> Collection[type[Event]]:
        return self._policy.asks

    def check(self, num_layers: int) -> None:
        self._policy.check(num_layers)

    def decide(self, event: Event) -> Sequence[Action]:
        if isinstance(event, LayerBegin) and event.backward and not self.answers:
            for nbytes in (100 * MIB, 1 << 40, 1 << 40):
                self.answers.append(self._policy.decide(HostPressure(nbytes)))
        return self._policy.decide(event)


def test_under_host_pressure_what_is_needed_last_is_spilled_and_fetched_before_its_reload() -> None:
    step = gpt()
    policy = Pressed(planned(step, 0.2)[0])
    machine = Machine(policy, LINK)
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
        assert kinds == [Offload, Release, Spill, Fetch, Reload]


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


def test_without_word_of_memory_it_goes_on_as_it_began() -> None:
    policy = PlannedPolicy(1000, LINK)
    events: list[Event] = [StepBegin(0), *(saved(0, i, i, 100) for i in range(20)), StepEnd(0)]
    assert {type(each) for each in tell(policy, events)} == {Offload, Release}
    assert policy.decide(StepMeasured(0, [1.0] * 20, 0.0)) == ()
    assert StepMeasured in policy.asks


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

"""PlannedPolicy where a step is not as planned: it costs time, and the budget is kept."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, pairwise

import pytest

from tests.policies.events import saved, tell
from tests.policies.places import Obeyed
from tests.policies.planned import best, gpt, planned
from tests.policies.simulated.machine import Machine, backwards
from tests.policies.simulated.random_steps import LINK, MIB
from tests.policies.simulated.steps import (
    Allocate,
    Compute,
    Drop,
    Op,
    Step,
    Use,
    budget_between,
    build,
    profile,
)
from tests.policies.simulated.strange_steps import coming_back, twice
from tiered_mem.policies import (
    Event,
    ForwardBegin,
    ForwardEnd,
    LayerBegin,
    LayerEnd,
    Offload,
    PlannedPolicy,
    Release,
)
from tiered_mem.policies.base import ExactMemory, StepBegin, StepEnd, StepMeasured
from tiered_mem.policies.places import Place, Placed, Places
from tiered_mem.policies.planning import Link


def test_a_longer_step_that_cannot_keep_the_budget_is_warned_of_and_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    step = gpt()
    policy, budget = planned(step, 0.1)
    machine = Machine(policy, LINK)
    machine.run(step)
    with caplog.at_level(logging.WARNING, "tiered_mem.policies"):
        for ratio in (2.0, 1.9, 1.8, 1.7):
            machine.run(step.scaled(ratio))
    assert "2.00 times the recorded size, or of more, may take more than the budget: the budget of" in caplog.text
    assert caplog.text.count("times the recorded size") == 1
    assert machine.run(step).peak <= budget


def test_micro_batches_that_find_gradients_there_have_a_plan_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    """In the first one they come, and stay. A plan for that with as many from the beginning has them twice."""
    layers = [[Op((2e-3, 4e-3), [64 * MIB], (64 * MIB, 64 * MIB))] * 3] * 6
    gradients = 96 * MIB
    first, later = build(layers, [gradients] * 6), build(layers, [0] * 6)
    later.code[:0] = [Allocate(6 * gradients)]
    later.code.append(Allocate(-6 * gradients))
    budget = budget_between(profile(later), 0.3)
    machine = Machine(PlannedPolicy(budget, LINK, recompute=False), LINK)
    for step in (first, later):
        machine.run(step)
    with caplog.at_level(logging.WARNING, "tiered_mem.policies"):
        for step in (first, later, later, later) * 2:
            outcome = machine.run(step)
            assert outcome.peak <= budget
            assert outcome.seconds == pytest.approx(best(step, budget), rel=1e-2)
    assert not caplog.text


def test_that_steps_of_other_kinds_have_no_plan_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    policy, _ = planned(gpt(layers=6), 0.1)
    machine = Machine(policy, LINK)
    machine.run(gpt(layers=6))
    with caplog.at_level(logging.WARNING, "tiered_mem.policies"):
        for layers in range(7, 12):
            machine.run(gpt(layers=layers, size=640 * MIB))
    assert caplog.text.count("there is no plan for a step that is not like those before") == 1


def step_seconds(step: Step) -> float:
    """Of its compute."""
    return sum(profile(step).seconds)


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


def test_the_times_of_a_slow_first_step_are_forgotten() -> None:
    """In it much is done that later ones need not do."""
    step = gpt()
    policy, _ = planned(step, 0.95)
    machine = Machine(policy, LINK)
    machine.run(gpt(seconds=4e-3))
    machine.run(step)
    assert policy.report().planned > 1.9 * step_seconds(step)
    for _ in range(7):
        machine.run(step)
    assert policy.report().planned < 1.1 * step_seconds(step)


def test_the_first_step_keeps_the_budget_while_others_take_more_and_more() -> None:
    step = gpt(layers=12)
    for place in reversed([place for place, each in enumerate(step.code) if isinstance(each, LayerEnd)]):
        step.code.insert(place, Allocate(50 * MIB))
    step.code.append(Allocate(-12 * 50 * MIB))
    budget = 1000 * MIB
    machine = Machine(PlannedPolicy(budget, LINK), LINK)
    assert machine.run(step).peak <= budget + 64 * MIB


def test_the_first_step_keeps_the_budget_where_more_comes_at_once_than_before() -> None:
    """As in the first backward, or where a forward puts together what it has kept."""
    step = gpt(layers=12)
    places = [place for place, each in enumerate(step.code) if isinstance(each, LayerEnd)]
    step.code.insert(places[9] + 1, Compute(0.0, 125 * MIB))  # each layer before takes 64 MiB beside its blocks
    for place in reversed(places[4:8]):
        step.code.insert(place, Allocate(60 * MIB))
    budget = 600 * MIB
    machine = Machine(PlannedPolicy(budget, LINK), LINK)
    assert machine.run(step).peak <= budget


def test_a_backward_that_comes_back_to_a_layer_is_planned_for() -> None:
    """As where two layers hand something on to all that follow them."""
    step = coming_back(gpt(), 2)
    policy, budget = planned(step)
    machine = Machine(policy, LINK)
    machine.run(step)
    outcome = machine.run(step)
    assert outcome.peak <= budget
    assert outcome.on_demand == 0
    assert outcome.seconds == pytest.approx(best(step, budget), rel=5e-3)


def test_a_margin_is_used_only_where_a_step_needs_it() -> None:
    step = gpt(layers=20, size=4 * MIB)
    budget, least, margin = budget_between(profile(step), 0.4), budget_between(profile(step), 0.0), 24 * MIB
    # Where there is no plan without it, half of what can be left free is.
    for given, room in ((budget, budget - margin), (least + 20 * MIB, least + 10 * MIB), (least, least)):
        machine = Machine(PlannedPolicy(given, LINK, margin=margin), LINK)
        machine.run(step)
        for _ in range(2):
            assert room - 4 * MIB <= machine.run(step).peak <= room
        assert machine.policy.report().budget == given


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
    assert caplog.text.count("more than the budget of") == 1
    assert machine.run(step).peak <= before.peak - 0.02 * budget


def test_a_step_a_little_above_the_budget_costs_little_of_it() -> None:
    step = gpt(layers=200, size=16 * MIB)
    peak = next(place for place, each in enumerate(step.code) if isinstance(each, LayerBegin) and each.backward)

    def with_work(nbytes: int) -> Step:
        return Step(step.blocks, [*step.code[: peak + 2], Compute(0.0, nbytes), *step.code[peak + 2 :]])

    def played() -> tuple[Machine, int, int]:
        policy, budget = planned(step)
        machine = Machine(policy, LINK)
        machine.run(step)
        return machine, budget, machine.run(step).peak

    machine, budget, before = played()
    there = machine.run(with_work(budget)).peak - budget
    machine, budget, before = played()
    assert machine.run(with_work(budget - there + MIB)).peak == budget + MIB
    assert 0.99 * budget <= machine.run(step).peak <= 0.998 * budget < before


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


def test_a_second_backward_over_the_same_blocks() -> None:
    step = gpt()
    policy, budget = planned(step)
    machine = Machine(policy, LINK)
    machine.run(step)
    for other in (twice(step), twice(step), step, twice(step)):
        outcome = machine.run(other)
        assert outcome.peak <= budget + step.blocks[0].nbytes
        assert machine.blocks == {}


def test_steps_with_two_backwards_over_the_same_blocks_have_a_plan() -> None:
    """What the first backward has used leaves once more, without another copy, and is back for the second."""
    step = twice(gpt())
    budget = budget_between(profile(gpt()), 0.2)
    machine = Machine(PlannedPolicy(budget, LINK), LINK)
    machine.run(step)
    for _ in range(4):
        outcome = machine.run(step)
        assert outcome.peak <= budget
        assert outcome.on_demand == 0
        assert machine.blocks == {}
        assert machine.on_host == 0
    out, back = outcome.copied
    assert out <= sum(block.nbytes for block in step.blocks) < back
    assert machine.policy.report().moved == out


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


@pytest.mark.parametrize("seed", range(6))
def test_events_that_the_plan_does_not_have_leave_room_for_what_it_knows_to_come(seed: int) -> None:
    """Reloads that wait do not come at them too early. That uses come twice there takes no more memory then."""
    rng = random.Random(seed)
    works = [rng.choice([0, 32, 256]) * MIB for _ in range(36)]
    ops = [Op((2e-3, 4e-3), [rng.choice([16, 64, 128]) * MIB], (0, work)) for work in works]
    step = build([ops[k : k + 3] for k in range(0, len(ops), 3)], [8 * MIB] * 12)
    begins = backwards(step)[0]
    more = [*step.code[:begins], Allocate(48 * MIB), *step.code[begins:], Allocate(-48 * MIB)]
    peaks = []
    for uses in (1, 2):
        policy, budget = planned(step, 0.1)
        machine = Machine(policy, LINK)
        machine.run(step)
        code = chain.from_iterable([each] * uses if isinstance(each, Use) else [each] for each in more)
        peaks.append(machine.run(Step(step.blocks, list(code))).peak)
    assert peaks[1] <= max(budget, peaks[0])


def test_without_word_of_memory_it_goes_on_as_it_began() -> None:
    policy = PlannedPolicy(1000, LINK)
    events: list[Event] = [StepBegin(0), *(saved(0, i, i, 100) for i in range(20)), StepEnd(0)]
    assert {type(each) for each in tell(Obeyed(policy), events)} == {Offload, Release}
    assert policy.decide(StepMeasured(0, [1.0] * 20, 0.0)) == ()
    assert StepMeasured in policy.asks


def test_steps_that_take_more_than_the_recorded_one_are_planned_for_as_they_are() -> None:
    step, link = gpt(layers=12, size=16 * MIB), Link(8e9, 8e9)
    policy, budget = planned(step, 0.4, link)
    machine = Machine(policy, link)
    machine.run(step)
    blocks = [replace(b, nbytes=b.nbytes * 21 // 20) if b.layer else b for b in step.blocks]
    larger = Step(blocks, step.code)
    machine.run(larger)
    for known in (1.0103, 1.0, 1.0):
        outcome = machine.run(larger)
        assert outcome.peak <= budget
        assert outcome.seconds == pytest.approx(known * best(larger, int(0.998 * budget), link), rel=1e-3)


def test_what_forward_still_has_is_released_in_the_first_step_when_it_lets_go() -> None:
    """Or it would be counted as memory of others that cannot move."""
    policy, places = PlannedPolicy(1000, LINK), Places[Placed]()
    policy.follow(places)
    tell(policy, [StepBegin(0), ExactMemory(0, 0), ForwardBegin(0, 30)])
    released = []
    for i in range(20):
        places.add(Placed(i, 100))
        policy.decide(ExactMemory(100 * (i + 1), 100 * (i + 1), held=(0, i)))
        for each in policy.decide(saved(0, i, i, 100)):
            places.move(places.by_key[each.key], Place.HOST if isinstance(each, Release) else Place.LEAVING)
            released += [each.key] if isinstance(each, Release) else []
    assert 1 in released
    assert 0 not in released
    policy.decide(ExactMemory(2000, 2000))
    assert Release(0) in policy.decide(LayerEnd(0, 19))


def test_what_stays_after_the_recorded_step_is_planned_for_at_once() -> None:
    """As an optimizer's states do, which the first step makes at its end."""
    step = gpt()
    policy, budget = planned(step, 0.6)
    machine = Machine(policy, LINK)
    machine.run(step)
    states = 16 * int(budget / 256)  # memory is planned for in 256 steps
    machine.allocate(states)
    for _ in range(2):
        outcome = machine.run(step)
        assert outcome.peak <= budget
        assert outcome.on_demand == 0
        assert outcome.seconds == pytest.approx(best(step, budget - states), rel=5e-3)
    machine.allocate(-states)
    assert machine.run(step).seconds == pytest.approx(best(step, budget), rel=5e-3)


@pytest.mark.parametrize("blocks", [1, 2])
def test_what_is_too_much_for_a_moment_costs_the_copy_out_of_what_is_used_last(blocks: int) -> None:
    """In a stage of a pipeline what was saved first is used next, and must not leave."""
    layers = [[Op((4e-3, 8e-3), [64 * MIB])] for _ in range(3)]
    step, link = build(layers, [0] * 3, ["F0", "F1", "F2", "B0", "B1", "B2"]), Link(16e9, 16e9)
    known = profile(step)
    policy = PlannedPolicy(max(known.full), link, recompute=False)  # nothing leaves
    machine = Machine(policy, link)
    machine.run(step)
    assert machine.run(step).copied == (0, 0)
    more, begins = blocks * 64 * MIB, backwards(step)
    code = [*step.code]
    code[begins[3] : begins[3]] = [Allocate(-more)]
    code[begins[0] : begins[0]] = [Allocate(more)]
    outcome = machine.run(Step(step.blocks, code))
    assert outcome.peak == max(known.full) + more
    assert outcome.copied == (more, more)
    assert outcome.stalls == pytest.approx(more / link.out, rel=0.01)
    assert outcome.on_demand == 0


def test_what_is_used_again_until_its_end_stays_where_there_is_too_much() -> None:
    """As a mask that all microbatches share."""
    layers = [[Op((4e-3, 8e-3), [64 * MIB])] for _ in range(3)]
    step, link = build(layers, [0] * 3, ["F0", "F1", "F2", "B0", "B1", "B2"]), Link(16e9, 16e9)
    begins = backwards(step)
    code = [*step.code, Drop(0)]
    for k in (begins[8], begins[5]):
        code.insert(k + 1, Use(0))
    code.remove(Drop(0))
    step = Step(step.blocks, code)
    known = profile(step)
    machine = Machine(PlannedPolicy(max(known.full), link, recompute=False), link)
    machine.run(step)
    assert machine.run(step).copied == (0, 0)
    begins, more = backwards(step), 6 * 64 * MIB
    code = [*step.code]
    code[begins[5] : begins[5]] = [Allocate(-more)]
    code[begins[4] : begins[4]] = [Allocate(more)]
    outcome = machine.run(Step(step.blocks, code))
    gone = 3 * 64 * MIB  # six of nine are alive, and six more come
    assert outcome.copied == (gone, gone)
    assert outcome.stalls == pytest.approx(gone / link.out, rel=0.01)


@pytest.mark.parametrize("layers", [10, 40])
def test_blocks_that_the_host_has_no_room_for_are_not_tried_again_at_each_event(layers: int) -> None:
    step = gpt(layers=layers, size=16 * MIB)
    policy, _ = planned(step, 0.3)
    machine = Machine(policy, LINK, host=64 * MIB)
    for _ in range(3):
        outcome = machine.run(step)
        assert sum(isinstance(each, Offload) for _, answer in outcome.log for each in answer) < 2 * len(outcome.log)


class Widened(Machine):
    """The host has room for all from the end of a forward on. levels: what the device has after each event then."""

    levels: Sequence[int] = ()

    def tell(self, event: Event) -> None:
        if isinstance(event, ForwardEnd):
            self.host, self.levels = None, []
        super().tell(event)
        self.levels = [*self.levels, self.level]


def test_they_leave_once_the_host_has_room() -> None:
    step = gpt(layers=20, size=16 * MIB)
    policy, budget = planned(step, 0.3)
    machine = Widened(policy, LINK, host=64 * MIB)
    assert machine.run(step).peak > 2 * budget
    assert max(machine.levels[3:]) <= budget


@pytest.mark.parametrize("share", [0.1, 0.4])
@pytest.mark.parametrize("place", [0.3, 0.5, 0.6])
def test_what_a_step_begins_without_may_come_in_its_midst(share: float, place: float) -> None:
    """As gradients do, where those of the step before it have gone by then."""
    step = gpt(layers=12)
    others = 128 * MIB
    budget = budget_between(profile(step), share) + others
    machine = Machine(PlannedPolicy(budget, LINK, recompute=False), LINK)
    machine.allocate(others)
    for _ in range(3):
        machine.run(step)
    machine.allocate(-others)
    middle = int(place * len(step.code))
    outcome = machine.run(Step(step.blocks, [*step.code[:middle], Allocate(others), *step.code[middle:]]))
    assert outcome.peak <= budget
    assert machine.run(step).peak <= budget

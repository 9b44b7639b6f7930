"""Where the device has room, a planned policy is told little, until more is taken than it knows of."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace

import pytest

from tests.policies.planned import gpt
from tests.policies.simulated.machine import Machine, Outcome
from tests.policies.simulated.random_steps import LINK, MIB
from tests.policies.simulated.steps import (
    Allocate,
    Compute,
    Op,
    Step,
    budget_between,
    build,
    one_forward_one_backward,
    profile,
)
from tiered_mem.policies import Event, ForwardEnd, LayerBegin, ManualPolicy, PlannedPolicy, Saved
from tiered_mem.policies.base import ExactMemory, LayerMemory, Memory, OnRequest, Used

STEP = gpt(layers=12, size=16 * MIB)


class Asking(PlannedPolicy):
    """A planned policy that keeps what it has asked for at each event."""

    def __init__(self, budget: int) -> None:
        super().__init__(budget, LINK, recompute=False)
        self.asked: list[Collection[type[OnRequest]]] = []

    def decide(self, event: Event):  # type: ignore[no-untyped-def]
        if not isinstance(event, Memory):
            self.asked.append(self.asks)
        return super().decide(event)

    def share(self, kind: type[OnRequest]) -> float:
        """The part of the events before which it asked for this; the next call is about those that follow."""
        asked, self.asked = self.asked, []
        return sum(kind in asks for asks in asked) / len(asked)


def settled(share: float, step: Step = STEP) -> tuple[Asking, Machine, int]:
    budget = budget_between(profile(step), share)
    policy = Asking(budget)
    machine = Machine(policy, LINK)
    for _ in range(6):
        machine.run(step)
    return policy, machine, budget


def test_where_nothing_has_to_move_only_layers_come_with_memory() -> None:
    policy, machine, _ = settled(2.0)
    policy.share(Used)
    outcome = machine.run(STEP)
    assert not any(answer for _, answer in outcome.log)
    assert not any(isinstance(event, Used) for event, _ in outcome.log[len(outcome.log) // 2 :])
    assert policy.share(Used) < 0.4
    assert outcome.peak == machine.run(STEP).peak


def test_where_blocks_move_memory_is_asked_for_where_there_may_be_no_room() -> None:
    policy, machine, budget = settled(0.8)
    policy.share(Memory)
    outcome = machine.run(STEP)
    assert 0.1 < policy.share(Memory) < 0.9
    assert outcome.peak <= budget
    assert any(isinstance(event, Used) for event, _ in outcome.log)


def larger(place: int, nbytes: int) -> Step:
    """The step with more memory taken by others from an event on."""
    return Step(STEP.blocks, [*STEP.code[:place], Allocate(nbytes), *STEP.code[place:], Allocate(-nbytes)])


@pytest.mark.parametrize("share", [0.3, 0.5])
def test_where_blocks_have_to_wait_for_room_memory_is_not_asked_for_with_each_event(share: float) -> None:
    policy, machine, budget = settled(share)
    tight = larger(next(k for k, each in enumerate(STEP.code) if isinstance(each, ForwardEnd)), 24 * MIB)
    for _ in range(4):
        machine.run(tight)
    policy.share(Memory)
    outcome = machine.run(tight)
    assert policy.share(Memory) < 0.1
    assert outcome.peak <= budget


def layers_told(outcome: Outcome) -> set[int]:
    return {event.layer for event, _ in outcome.log if isinstance(event, Saved)}


def test_where_there_is_half_as_much_room_again_layers_are_left_to_autograd() -> None:
    _, machine, _ = settled(2.0)
    outcome = machine.run(STEP)
    assert layers_told(outcome) == {0}  # by whose blocks the step is known
    assert not machine.blocks
    assert outcome.peak == Machine(ManualPolicy(), LINK).run(STEP).peak


def test_each_graph_of_a_step_is_known_by_the_blocks_of_its_first_layer() -> None:
    """Or the step would seem over when the first one's are gone."""
    layer = [Op((1e-3, 2e-3), [4 * MIB], (4 * MIB, 4 * MIB)) for _ in range(3)]
    step = build([layer] * 6, [0] * 6, one_forward_one_backward(6, 3))
    _, machine, _ = settled(2.0, step)
    outcome = machine.run(step)
    told = {(event.graph, event.layer) for event, _ in outcome.log if isinstance(event, Saved)}
    graphs = {graph for graph, _ in told}
    assert len(graphs) == 6
    assert told == {(graph, 0) for graph in graphs}


def test_with_less_room_all_that_layers_save_are_blocks() -> None:
    _, machine, _ = settled(1.6)
    assert layers_told(machine.run(STEP)) == set(range(12))


def test_layers_are_blocks_again_once_others_take_the_room() -> None:
    _, machine, budget = settled(2.0)
    middle = next(k for k, each in enumerate(STEP.code) if isinstance(each, LayerBegin) and each.layer == 6)
    outcome = machine.run(larger(middle, budget - machine.run(STEP).peak + 16 * MIB))
    told = layers_told(outcome)
    assert told.isdisjoint(range(1, 6))
    assert 11 in told
    assert any(answer for _, answer in outcome.log)
    assert outcome.peak <= budget


def test_a_resting_policy_wakes_where_others_take_the_room() -> None:
    policy, machine, budget = settled(1.6)
    policy.share(LayerMemory)
    middle = next(k for k, each in enumerate(STEP.code) if isinstance(each, LayerBegin) and each.layer == 6)
    peak = machine.run(STEP).peak
    assert policy.share(LayerMemory) > 0.5
    outcome = machine.run(larger(middle, budget - peak // 2))
    assert outcome.peak <= budget
    assert any(answer for _, answer in outcome.log)
    assert ExactMemory in policy.asks  # the next one is recorded


def test_a_resting_policy_wakes_where_blocks_are_larger() -> None:
    _, machine, budget = settled(1.6)
    twice = [replace(each, nbytes=each.nbytes * (1 if k < 20 else 4)) for k, each in enumerate(STEP.blocks)]
    outcome = machine.run(Step(twice, list(STEP.code)))
    assert outcome.peak <= budget
    assert any(answer for _, answer in outcome.log)


def test_a_step_that_woke_is_recorded_and_then_planned() -> None:
    _, machine, budget = settled(1.6)
    blocks = [replace(each, nbytes=each.nbytes * (1 if k < 20 else 4)) for k, each in enumerate(STEP.blocks)]
    other = Step(blocks, list(STEP.code))
    stalls = [machine.run(other).stalls for _ in range(6)]
    assert stalls[-1] < stalls[0]
    assert machine.run(other).peak <= budget


def test_what_takes_too_much_after_a_rest_is_told_as_such(caplog: pytest.LogCaptureFixture) -> None:
    """As an optimizer may that is not registered."""
    _, machine, budget = settled(1.6)
    after = Step(STEP.blocks, [*STEP.code, Compute(0.0, budget + MIB)])
    with caplog.at_level(logging.WARNING, "tiered_mem.policies"):
        assert machine.run(after).peak > budget
        machine.run(STEP)
    assert "after the last use of what was saved" in caplog.text

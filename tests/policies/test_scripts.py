"""A step that goes as one before it is answered from what that one was: the same, and with little work."""

from __future__ import annotations

import random
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from math import inf
from types import FrameType

import pytest

from tests.policies.planned import gpt, planned
from tests.policies.simulated.machine import Machine, Outcome
from tests.policies.simulated.random_steps import KINDS, LINK, MIB
from tests.policies.simulated.steps import Allocate, Compute, Drop, Op, Step, budget_between, build, profile
from tiered_mem.policies import (
    Action,
    Event,
    ForwardBegin,
    ForwardEnd,
    HostPressure,
    LayerBegin,
    PlannedPolicy,
    Policy,
)
from tiered_mem.policies.actions import Advice, Keep
from tiered_mem.policies.base import Dropped, LayerMemory, Memory, OnRequest, Saved, StepBegin, Used
from tiered_mem.policies.planning.script import Repetition, Script, Transcript


class Thinking(Policy):
    """A planned policy that has no script to go by: it was told of pressure in each step."""

    def __init__(self, policy: PlannedPolicy) -> None:
        self.policy = policy
        self.follow = policy.follow

    @property
    def asks(self) -> Collection[type[OnRequest]]:
        return self.policy.asks

    def decide(self, event: Event) -> Sequence[Action]:
        answer = self.policy.decide(event)
        if isinstance(event, StepBegin):
            assert not self.policy.decide(HostPressure(0))
        return answer


class ToldTogether(PlannedPolicy):
    """A planned policy that is told of blocks together where that will do. All layers save blocks."""

    def decide(self, event: Event) -> Sequence[Advice]:
        return [each for each in super().decide(event) if not isinstance(each, Keep)]


class ToldAll(Policy):
    """A planned policy that hears of all uses and memory, and of each by itself, also where it would do without."""

    def __init__(self, policy: PlannedPolicy) -> None:
        self.policy = policy
        self.follow = policy.follow

    def decide(self, event: Event) -> Sequence[Advice]:
        answer = [each for each in self.policy.decide(event) if not isinstance(each, Keep)]
        if (repetition := self.policy._player._repetition) is not None:
            repetition.together = None
        return answer

    @property
    def asks(self) -> Collection[type[OnRequest]]:
        asks = set(self.policy.asks)
        return asks - {LayerMemory} | {Used, Memory} if LayerMemory in asks else asks


def changed(step: Step, rng: random.Random) -> Step:
    """The step, or one that differs in one thing from some place on."""
    code, blocks = list(step.code), list(step.blocks)
    match rng.randrange(8):
        case 0:
            code.insert(rng.randrange(len(code)), Allocate(rng.choice([-1, 1]) * rng.randrange(64 * MIB)))
        case 1:
            code.insert(rng.randrange(len(code)), Compute(0.0, rng.randrange(512 * MIB)))
        case 2:
            place = rng.choice([place for place, each in enumerate(code) if isinstance(each, Drop)])
            code.append(code.pop(place))
        case 3 if len(blocks) > 8:
            place = rng.randrange(8, len(blocks))
            blocks[place] = replace(blocks[place], nbytes=blocks[place].nbytes + rng.choice([-1, 1]) * MIB // 2)
        case 4:
            return step.scaled(rng.choice([0.5, 0.75]))
        case 5:
            place = rng.choice([place for place, each in enumerate(code) if isinstance(each, LayerBegin)])
            code.insert(place, code[place])
    return Step(blocks, code)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_answers_are_those_of_a_policy_that_thinks(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    step = KINDS[kind](seed)
    budget = budget_between(profile(step), rng.choice([0.1, 0.5]))
    capacity = rng.choice([None, budget])
    policies = [
        ToldAll(PlannedPolicy(budget, LINK)),
        Thinking(PlannedPolicy(budget, LINK)),
        ToldTogether(budget, LINK),
    ]
    machines = [Machine(each, LINK, capacity=capacity) for each in policies]
    now = step
    for number in range(15):
        if number % 3 == 2:
            now = changed(step, rng)
        places = range(len(now.code))
        lost = range(rng.choice(places), len(places)) if number > 4 and rng.random() < 0.2 else ()
        now = changed(now, rng) if number % 3 == 1 else now
        outcomes = [machine.run(now, lost=lost) for machine in machines]
        assert told(outcomes[0]) == told(outcomes[1]), number
        if number % 3 == 0:  # it goes as the one before
            assert replace(outcomes[2], log=[]) == replace(outcomes[1], log=[]), number
        assert machines[0].places.resident == machines[1].places.resident == machines[2].places.resident
        if number % 3 == 0:
            for machine in machines:
                for key in list(machine.blocks):
                    machine.drop(key)
                machine.allocate(-machine.level)


def test_answers_for_want_of_room_are_given_again_until_there_is_room() -> None:
    step = gpt(layers=12, size=16 * MIB)
    policy, budget = planned(step, 0.3)
    thinking = PlannedPolicy(budget, LINK)
    machines = [Machine(ToldAll(policy), LINK), Machine(Thinking(thinking), LINK)]
    middle = next(place for place, each in enumerate(step.code) if isinstance(each, ForwardEnd))
    tight = Step(step.blocks, [*step.code[:middle], Allocate(24 * MIB), *step.code[middle:], Allocate(-24 * MIB)])
    steps = [step, tight]
    for place in range(middle, len(tight.code), 7):
        other = [*tight.code[:place], Allocate(-9 * MIB), *tight.code[place:], Allocate(9 * MIB)]
        steps += [tight, tight, Step(step.blocks, other)]
    for number, each in enumerate(steps):
        outcomes = [machine.run(each) for machine in machines]
        assert told(outcomes[0]) == told(outcomes[1]), number


def told(outcome: Outcome) -> list[tuple[Event, list[Action]]]:
    return [(event, list(answer)) for event, answer in outcome.log]


class Calls:
    """How often policies called a function of theirs inside."""

    def __enter__(self) -> Calls:
        self.count = 0
        sys.setprofile(self._see)
        return self

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        # The machine writes places.py.
        own = "policies" in path and "/tests/" not in path and not path.endswith("places.py")
        self.count += event == "call" and own

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


def test_a_step_like_the_last_one_is_only_compared_with_it() -> None:
    step = gpt(layers=40)
    policy, _ = planned(step)
    machine = Machine(policy, LINK)
    other = Step(step.blocks, list(step.code))
    other.code.append(other.code.pop(next(place for place, each in enumerate(step.code) if isinstance(each, Drop))))
    counts: list[float] = []
    events = 0
    for each in (step, step, step, step, other, other, other):
        with Calls() as calls:
            outcome = machine.run(each)
        events = max(events, len(outcome.log))
        counts.append(calls.count / events)
    thought, like = counts[1], (*counts[2:4], *counts[5:])
    assert max(like) < min(12, thought / 3)
    assert counts[4] > thought / 2  # it differs from its first backward on


MANY = build([[Op((1e-3, 2e-3), [8 * MIB] * 8)] * 2] * 8, [MIB] * 8)


def machines_for(share: float, kind: type[ToldTogether] = ToldTogether) -> tuple[Machine, Machine]:
    """One whose policy is told together what needs no answer, and one whose policy thinks."""
    budget = budget_between(profile(MANY), share)
    thinking = Thinking(PlannedPolicy(budget, LINK, recompute=False))
    return Machine(kind(budget, LINK, recompute=False), LINK), Machine(thinking, LINK)


def test_what_needs_no_answer_is_told_together() -> None:
    machines = machines_for(0.7)
    for number in range(6):
        outcomes = [machine.run(MANY) for machine in machines]
        assert replace(outcomes[0], log=[]) == replace(outcomes[1], log=[]), number
    together, thought = ([type(event) for event, _ in outcome.log] for outcome in outcomes)
    assert outcomes[0].copied[0] > 0
    for kind in (Saved, Used, Dropped):
        assert together.count(kind) < thought.count(kind) / 2, kind


@pytest.mark.parametrize(
    ("device", "limit", "together"),
    [(1000, 1040, True), (980, 1040, False), (1018, 1040, False), (1000, 1060, False), (1000, 1022, False)],
)
def test_each_is_told_where_the_memory_may_not_be_right_for_all(device: int, limit: int, together: bool) -> None:
    """A drop has another answer with 51 bytes to spare, and a use with less than 20; 4 bytes are for surprises."""
    events: list[tuple[Event, tuple[float, float]]] = [
        (ForwardBegin(0, 1), (-inf, inf)),
        (Saved(0, 0, [(1, 10)]), (-inf, inf)),
        (Saved(0, 0, [(2, 10)]), (-inf, inf)),
        (LayerBegin(0, 0, backward=True), (-inf, inf)),
        (Used(0, 0, 2), (-inf, inf)),
        (Dropped([2]), (-50, inf)),
        (Used(0, 0, 1), (-inf, -20)),
        (Dropped([1]), (-inf, inf)),
    ]
    written, begun = Transcript(), Transcript()
    for place, (event, between) in enumerate(events):
        for transcript in (written, begun)[: 2 if place < 3 else 1]:
            transcript.add(event, 1000, (0, 0), between, (), ())
    repetition = Repetition(Script(written.lines, ends_empty=True), begun)
    assert repetition.answer(events[3][0], Memory(device, device), limit) == ()
    assert (repetition.together is not None) == together
    if together:
        # What the budget is may change in between.
        assert repetition.answer_together(Dropped([2, 1]), limit - 1) is None
        assert repetition.answer_together(Dropped([2, 1]), limit) == ()
        assert [event for _, event, *_ in repetition.unnoted()] == [event for event, _ in events[3:]]


class ToldLate(ToldTogether):
    """Is told of more blocks together than it has said."""

    def decide(self, event: Event) -> Sequence[Advice]:
        answer = super().decide(event)
        self.gather_bytes *= 1 if self.gather_bytes == 1 else 2
        return answer


def test_what_is_told_too_late_has_all_its_answers() -> None:
    machines = machines_for(0.5, ToldLate)
    for _ in range(6):
        outcomes = [machine.run(MANY) for machine in machines]
    late, thought = ([each for _, answer in outcome.log for each in answer] for outcome in outcomes)
    assert len(outcomes[0].log) < len(outcomes[1].log) / 2
    assert late == thought

"""A planned policy tries how layers can be treated, chooses, and keeps to its choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from tests.policies.simulated.machine import Machine, Outcome
from tests.policies.simulated.steps import INPUT, Compute, Instruction, Step, budget_between
from tests.policies.simulated.strange_steps import twice
from tests.policies.simulated.treated import Model, decoder
from tiered_mem.policies import LayerBegin, PlannedPolicy, Saved
from tiered_mem.policies.actions import How
from tiered_mem.policies.base import ExactMemory, Used
from tiered_mem.policies.planning import Link
from tiered_mem.policies.planning.step import StepUnderWay

LINK = Link(10e9, 10e9, 1.0, 5e-6)
LAYERS = 8
SETTLED = 12  # steps, after which all ways were tried


class Training:
    """Steps of a model under a policy, each with the treatment that it had."""

    def __init__(
        self, model: Model, share: float, *, link: Link = LINK, recompute: bool = True, can: bool = True
    ) -> None:
        self.model = model
        self.budget = budget_between(model.recorded().profile, share)
        self.machine = Machine(PlannedPolicy(self.budget, link, recompute=recompute), link)
        self._remade = model.step if can else None
        self.treated: list[Mapping[int, How]] = []

    def step(self, step: Step | None = None) -> Outcome:
        outcome = self.machine.run(step or self.model.step(), remade=self._remade)
        self.treated.append(dict(self.machine.treated))
        return outcome

    def settled(self) -> float:
        """The seconds of the last step."""
        return [self.step().seconds for _ in range(SETTLED)][-1]


@pytest.mark.parametrize("share", [0.2, 0.3, 0.5])
def test_it_is_faster_than_moving_alone_and_keeps_the_budget(share: float) -> None:
    training = Training(decoder(LAYERS), share)
    outcomes = [training.step() for _ in range(SETTLED)]
    moving = Training(decoder(LAYERS), share, recompute=False)
    assert outcomes[-1].seconds < 0.97 * moving.settled()
    assert max(outcome.peak for outcome in outcomes) <= training.budget
    assert training.treated[-1]
    assert moving.treated[-1] == {}


@pytest.mark.parametrize("share", [0.0, 0.05, 0.1])
def test_the_budget_is_kept_where_no_layer_has_room_to_be_computed_again(share: float) -> None:
    training = Training(decoder(LAYERS), share)
    assert max(training.step().peak for _ in range(SETTLED)) <= training.budget


@pytest.mark.parametrize("share", [0.02, 0.06, 0.1, 0.14])
def test_the_budget_is_kept_where_some_layers_have_room_to_be_computed_again(share: float) -> None:
    """The gradients that have come by then are large, so that the first layers have less room than the last."""
    training = Training(Model(decoder(LAYERS).layers, 96 << 20), share)
    assert max(training.step().peak for _ in range(SETTLED)) <= training.budget


def test_a_layer_finds_room_by_what_others_like_it_have_shown() -> None:
    """Less comes when it is computed again than its forward took, so that one more can be than were at first."""
    training = Training(Model(decoder(LAYERS).layers, 48 << 20), 0.0)
    assert max(training.step().peak for _ in range(SETTLED)) <= training.budget
    tried = [treated for treated in training.treated if set(treated.values()) == {"full"}]
    assert tried[0].keys() == {4, 5, 6, 7}
    assert tried[-1].keys() == {3, 4, 5, 6, 7}
    assert training.treated[-1][3] == "full"


def test_nothing_is_tried_where_nothing_waits() -> None:
    training = Training(decoder(LAYERS), 1.0)
    training.settled()
    assert training.treated == [{}] * SETTLED


class Awaited(Training):
    """A rank of a pipeline, whose first steps wait for others before each of its layers.

    idle: for so many seconds.
    """

    def __init__(self, model: Model, share: float, idle: float) -> None:
        super().__init__(model, share)
        self.idle = idle
        self._remade = self._waiting

    def step(self, step: Step | None = None) -> Outcome:
        if len(self.treated) >= SETTLED:
            self.idle = 0.0
        return super().step(self._waiting({}))

    def _waiting(self, treated: Mapping[int, How]) -> Step:
        step = self.model.step(treated)
        code: list[Instruction] = []
        for each in step.code:
            if isinstance(each, LayerBegin):
                code.append(Compute(self.idle))
            code.append(each)
        return Step(step.blocks, code)


@pytest.mark.parametrize("share", [0.2, 0.3, 0.4, 0.5])
@pytest.mark.parametrize("idle", [5e-3, 20e-3])
def test_who_waited_for_others_at_first_chooses_again_when_these_are_faster(share: float, idle: float) -> None:
    """With the longer waits nothing was tried at all, as all copies were hidden."""
    training, never = Awaited(decoder(LAYERS), share, idle), Training(decoder(LAYERS), share)
    for _ in range(SETTLED):
        training.step()
    before = training.treated[-1]
    for _ in range(2 * SETTLED):
        taken = training.step().seconds
    assert taken <= 1.01 * never.settled()
    assert len(before) < len(training.treated[-1])


def test_no_layer_is_computed_again_to_which_backward_comes_twice() -> None:
    """A checkpoint would keep what each time has computed until the graph is gone."""
    training = Training(decoder(LAYERS), 0.3)
    for _ in range(SETTLED):
        assert training.step(twice(training.model.step())).peak <= training.budget
    assert training.treated == [{}] * SETTLED


def test_each_way_is_tried_once_and_a_choice_stays() -> None:
    training = Training(decoder(LAYERS), 0.3)
    for _ in range(5 * SETTLED):
        training.step()
    full = [set(treated.values()) for treated in training.treated if len(treated) == LAYERS]
    assert full.count({"cheap"}) == full.count({"full"}) == 1
    assert len({str(treated) for treated in training.treated[SETTLED:]}) == 1


@pytest.mark.parametrize("share", [0.1, 0.12, 0.15])
def test_what_cheap_keeps_is_known_from_trials_of_full_where_it_finds_no_room_by_a_guess(share: float) -> None:
    training = Training(decoder(LAYERS), share)
    outcomes = [training.step() for _ in range(2 * SETTLED)]
    ways = [set(treated.values()) for treated in training.treated if len(treated) == LAYERS]
    assert ways[:2] == [{"full"}, {"cheap"}]
    assert "cheap" in training.treated[-1].values()
    assert max(outcome.peak for outcome in outcomes) <= training.budget


def test_a_choice_in_which_all_layers_are_treated_as_in_a_recorded_step_is_not_recorded_again() -> None:
    training = Training(Model(decoder(5).layers, 0), 0.14)
    training.settled()
    for _ in range(SETTLED):
        training.step()
    assert set(training.treated[-1].values()) == {"cheap"}
    assert len(training.treated[-1]) == 5
    assert ExactMemory not in training.machine.policy.asks


def test_a_choice_of_all_layers_that_can_be_treated_is_recorded_once() -> None:
    model = Model(decoder(5).layers, 0)
    training = Training(model, 0.3)
    training._remade = lambda treated: model.step({layer: how for layer, how in treated.items() if layer > 3})
    for _ in range(2 * SETTLED):
        training.step()
    assert training.treated[-1].keys() == {4}
    assert ExactMemory not in training.machine.policy.asks


@pytest.mark.parametrize("share", [0.3, 0.5])
def test_a_choice_that_no_plan_can_be_made_for_is_not_recorded_without_end(share: float) -> None:
    """Such as where it takes more than the budget when its backward is over."""
    model = decoder(LAYERS)
    training = Training(model, share)

    def remade(treated: Mapping[int, How]) -> Step:
        step = model.step(treated)
        as_chosen = len(treated) < LAYERS or len(set(treated.values())) > 1
        return Step(step.blocks, [*step.code, Compute(1e-3, training.budget + (1 << 20))]) if as_chosen else step

    training._remade = remade
    for _ in range(2 * SETTLED):
        outcome = training.step()
    assert outcome.peak > training.budget
    assert ExactMemory not in training.machine.policy.asks


def test_where_no_layer_can_be_computed_again_all_is_as_before() -> None:
    training = Training(decoder(LAYERS), 0.3, can=False)
    assert training.settled() == pytest.approx(Training(decoder(LAYERS), 0.3, recompute=False).settled())


def test_a_layer_that_cannot_be_computed_again_keeps_all() -> None:
    """The others are treated all the same."""
    model = decoder(LAYERS)
    training = Training(model, 0.3)
    training._remade = lambda treated: model.step({layer: how for layer, how in treated.items() if layer != 3})
    moving = Training(decoder(LAYERS), 0.3, recompute=False)
    assert training.settled() < 0.97 * moving.settled()


class WithStates(Training):
    """Beside optimizer states, of which as many are on the device as the policy wants there."""

    def __init__(self, model: Model, share: float, nbytes: int) -> None:
        super().__init__(model, share)
        self.states = self.machine.policy.states  # type: ignore[attr-defined]
        self.states.total = nbytes

    def step(self, step: Step | None = None) -> Outcome:
        wanted = self.states.planned
        self.machine.allocate(wanted - self.states.kept)
        self.states.kept = wanted
        return super().step(step)


@pytest.mark.parametrize("nbytes", [256 << 20, 512 << 20, 1024 << 20])
def test_optimizer_states_leave_room_for_trials_and_come_back(nbytes: int) -> None:
    training = WithStates(decoder(LAYERS), 0.75, nbytes)
    kept, peaks = [], []
    for _ in range(2 * SETTLED):
        peaks.append(training.step().peak)
        kept.append(training.states.kept)
    assert max(peaks) <= training.budget
    first = next(number for number, treated in enumerate(training.treated) if treated)
    assert min(kept[1 : first - 1]) > 0
    assert kept[first - 1 : first + 1] == [0, 0], "a step of trials, and one that is recorded"
    assert kept[-1] > 0


def test_a_shorter_step_that_need_not_wait_keeps_all() -> None:
    training = Training(decoder(LAYERS), 0.5)
    training.settled()
    assert training.treated[-1]
    short = decoder(LAYERS, size=16 << 20).step()
    code = [replace(each, inputs=INPUT // 4) if isinstance(each, LayerBegin) else each for each in short.code]
    training.step(Step(short.blocks, code))
    assert training.treated[-1] == {}


def test_a_slower_link_leads_to_another_choice() -> None:
    training = Training(decoder(LAYERS), 0.5)
    training.settled()
    before = training.treated[-1]
    training.machine.link = Link(3e9, 3e9, 1.0, 5e-6)
    for _ in range(40):
        outcome = training.step()
    assert len(training.treated[-1]) > len(before)
    assert outcome.peak <= training.budget
    assert len({str(treated) for treated in training.treated[-10:]}) == 1


@pytest.mark.parametrize(("savers", "split"), [((0,), True), ((0, 1), False)])
def test_what_several_graphs_have_saved_tells_of_no_second_backward(savers: tuple[int, ...], split: bool) -> None:
    """Such as the inputs that all microbatches share: each of their backwards uses it."""
    step = StepUnderWay(0)
    for graph in savers:
        step.take(LayerBegin(graph, 0, backward=False), 0)
        step.take(Saved(graph, 0, [(7, INPUT)]), 0)
    for graph in (0, 1):
        step.take(LayerBegin(graph, 0, backward=True), 0)
        step.take(Used(savers[-1], 0, 7), 0)
    assert step.recording.split == split

"""PlannedPolicy is told anything, in any order: it never raises, and nothing stays away when it is needed."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.policies.simulated.machine import Block, Machine, Place
from tests.policies.simulated.random_steps import LINK, MIB
from tests.policies.simulated.steps import Op, Step, budget_between, build, profile
from tests.policies.simulated.strange_steps import coming_back, threads, twice
from tiered_mem.policies import (
    Event,
    ForwardBegin,
    ForwardEnd,
    HostPressure,
    LayerBegin,
    LayerEnd,
    Offload,
    PlannedPolicy,
    Policy,
    Release,
    Reload,
    Spill,
)
from tiered_mem.policies.actions import Advice, Recompute
from tiered_mem.policies.base import Refused, StepBegin, StepEnd, StepMeasured, Used
from tiered_mem.policies.planned import _STRAYS
from tiered_mem.policies.planning import BudgetTooSmall, Link

GRAPHS = st.integers(0, 2)
LAYERS = st.integers(0, 3)
LARGEST = 64 * MIB
LAYER = [Op((1e-3, 2e-3), [LARGEST], (LARGEST, LARGEST))] * 2
STEP = build([LAYER] * 4, [MIB] * 4)
BUDGETS = {share: budget_between(profile(STEP), share) for share in (-0.2, 0.0, 0.3, 1.0)}
DRIVE = Link(2e9, 2e9)

STEPS: dict[str, Callable[[int], Step]] = {
    "as known": lambda seed: STEP,
    "shorter": lambda seed: STEP.scaled(0.4),
    "longer": lambda seed: STEP.scaled(1.3),
    "of other layers": lambda seed: build([LAYER] * (1 + seed % 6), [MIB] * 6),
    "with a second backward": lambda seed: twice(STEP),
    "with a backward that comes back": lambda seed: coming_back(STEP, 1 + seed % 3),
    "of microbatches": lambda seed: build([LAYER] * 2, [MIB] * 2, ["F0", "F1", "B0", "F2", "B1", "B2"]),
    "of threads": lambda seed: threads([STEP.scaled(0.5)] * 2, seed),
}


class Watched(Policy):
    """A PlannedPolicy, of which each answer is looked at.

    blocks: those that are alive, which a machine keeps.
    """

    def __init__(self, policy: PlannedPolicy) -> None:
        self.policy = policy
        self.follow = policy.follow
        self.blocks: Mapping[int, Block] = {}

    @property
    def asks(self) -> object:
        return self.policy.asks

    @property
    def gather_bytes(self) -> int:
        return self.policy.gather_bytes

    def decide(self, event: Event) -> Sequence[Advice]:
        try:
            answer = self.policy.decide(event)
        except BudgetTooSmall:
            assert isinstance(event, StepMeasured)
            assert self.policy.report().missing  # as the first step was measured
            return ()
        for each in answer:
            if isinstance(each, Recompute):
                assert isinstance(event, LayerBegin)
                assert not event.backward
                continue
            assert each.key in self.blocks, f"{each} after {event} is of a block that is gone"
        if isinstance(event, Used) and self.blocks[event.key].place is Place.HOST:
            assert Reload(event.key) in answer
        moves = [type(each) for each in answer if isinstance(each, Release | Reload)]
        assert moves == sorted(moves, key=lambda move: move is Reload), "room is made before anything comes"
        return answer


class Anything(RuleBasedStateMachine):
    """Knows a step or not; then come events of any kind, with whole steps of some kinds between them."""

    @initialize(
        share=st.sampled_from(sorted(BUDGETS)),
        drive=st.sampled_from([None, DRIVE]),
        fragments=st.sampled_from([None, 0, LARGEST]),
        capacity=st.booleans(),
        known=st.booleans(),
        recompute=st.booleans(),
    )
    def begin(
        self,
        share: float,
        drive: Link | None,
        fragments: int | None,
        capacity: bool,
        known: bool,
        recompute: bool,
    ) -> None:
        self.budget = BUDGETS[share]
        self.policy = PlannedPolicy(
            self.budget + (fragments or 0),
            Link(LINK.out, LINK.back, LINK.both, LINK.latency, drive=drive),
            fragments=fragments,
            host_bytes=4 * LARGEST,
            recompute=recompute,
        )
        watched = Watched(self.policy)
        size = 2 * self.budget if capacity else None
        self.machine = Machine(watched, LINK, host=6 * LARGEST, capacity=size, gathers=True)
        watched.blocks = self.machine.blocks
        self.keys = 10**6
        self.number = 1000
        if known:
            self.machine.run(STEP)

    @rule()
    def begin_step(self) -> None:
        self.number += 1
        self.machine.request(StepBegin(self.number))

    @rule()
    def end_step(self) -> None:
        self.machine.request(StepEnd(self.number))

    @rule(seconds=st.lists(st.floats(0, 1), max_size=60), stalls=st.floats(0, 1), rate=st.sampled_from([0.0, 1e9]))
    def measured(self, seconds: list[float], stalls: float, rate: float) -> None:
        assert self.policy.decide(StepMeasured(self.number, seconds, stalls, rate, rate)) == ()

    @rule(graph=GRAPHS)
    def forward(self, graph: int) -> None:
        self.machine.tell(ForwardBegin(graph, 4))

    @rule(graph=GRAPHS)
    def forward_ends(self, graph: int) -> None:
        self.machine.tell(ForwardEnd(graph))

    @rule(graph=GRAPHS, layer=LAYERS, backward=st.booleans())
    def layer(self, graph: int, layer: int, backward: bool) -> None:
        self.machine.tell(LayerBegin(graph, layer, backward))

    @rule(graph=GRAPHS, layer=LAYERS)
    def layer_ends(self, graph: int, layer: int) -> None:
        self.machine.tell(LayerEnd(graph, layer))

    @rule(graph=GRAPHS, layer=LAYERS, nbytes=st.integers(1, LARGEST), again=st.booleans(), data=st.data())
    def save(self, graph: int, layer: int, nbytes: int, again: bool, data: st.DataObject) -> None:
        on_device = [key for key, block in self.machine.blocks.items() if block.place is Place.DEVICE]
        self.keys += 1
        key = data.draw(st.sampled_from(on_device)) if again and on_device else self.keys
        self.machine.save(key, graph, layer, nbytes)

    @precondition(lambda self: self.machine.blocks)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        self.use_block(data.draw(st.sampled_from(list(self.machine.blocks))))

    @precondition(lambda self: self.machine.blocks)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.machine.drop(data.draw(st.sampled_from(list(self.machine.blocks))))

    @rule(nbytes=st.integers(-LARGEST, LARGEST))
    def others(self, nbytes: int) -> None:
        self.machine.allocate(max(nbytes, self.resident - self.machine.level))

    @rule(nbytes=st.integers(1, 4 * LARGEST))
    def pressure(self, nbytes: int) -> None:
        """The machine has no disk: what is spilled is only known to be on its way there."""
        while answer := self.policy.decide(HostPressure(nbytes)):
            assert {type(each) for each in answer} <= {Release, Spill}
            self.machine.act(answer)

    @rule(key=st.integers(0, 10**6))
    def refused(self, key: int) -> None:
        assert self.policy.decide(Refused(Reload(key))) == ()
        if key not in self.machine.blocks:
            assert self.policy.decide(Refused(Offload(key))) == ()

    @rule(kind=st.sampled_from(sorted(STEPS)), stop=st.integers(0, 400), seed=st.integers(0, 7))
    def whole_step(self, kind: str, stop: int, seed: int) -> None:
        """One that may end early, by an exception, with some events left out."""
        step, rng = STEPS[kind](seed), random.Random(seed)
        lost = [place for place in range(len(step.code)) if place > stop or (seed > 3 and rng.random() < 0.1)]
        before = set(self.machine.blocks)
        remade = (
            None if lost or kind != "as known" else lambda treated: build([LAYER] * 4, [MIB] * 4, treated=treated)
        )
        self.machine.run(step, lost=lost, remade=remade)
        if not lost:
            assert set(self.machine.blocks) == before

    @property
    def resident(self) -> int:
        """The bytes of the blocks on the device."""
        blocks = self.machine.blocks.values()
        return sum(block.nbytes for block in blocks if block.place is not Place.HOST)

    @invariant()
    def knows_where_blocks_are(self) -> None:
        assert self.machine.places.resident == self.resident

    def use_block(self, key: int) -> None:
        self.machine.use(key)
        assert self.machine.blocks[key].place in (Place.DEVICE, Place.LEAVING)

    def teardown(self) -> None:
        machine = self.machine
        for key in list(machine.blocks):
            self.use_block(key)
            machine.drop(key)
        assert machine.on_host == 0 == machine.places.resident
        machine.allocate(-machine.level)
        # One that begins as another did is taken for that, and recorded the next time; of many strange ones each
        # fourth is.
        for _ in range(5 if self.policy._strays > _STRAYS else 2):
            machine.run(STEP)
        for _ in range(2):
            least = max(self.budget, BUDGETS[0.0])
            assert machine.run(STEP).peak <= least + LARGEST
        assert machine.blocks == {}


def test_anything() -> None:
    run_state_machine_as_test(
        Anything, settings=settings(max_examples=20, stateful_step_count=30, deadline=None, derandomize=True)
    )


@pytest.mark.slow(why="hundreds of histories, others in each run")
def test_anything_at_length() -> None:
    run_state_machine_as_test(Anything, settings=settings(max_examples=300, stateful_step_count=50, deadline=None))

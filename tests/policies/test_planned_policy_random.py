"""PlannedPolicy is told anything, in any order: it never raises, and nothing stays away when it is needed."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.policies.simulated.machine import Machine, Place
from tests.policies.simulated.random_steps import LINK, MIB
from tests.policies.simulated.steps import Op, budget_between, build, profile
from tiered_mem.policies import (
    ForwardBegin,
    ForwardEnd,
    HostPressure,
    LayerBegin,
    LayerEnd,
    PlannedPolicy,
    Refused,
    Release,
    Reload,
    Spill,
    StepBegin,
    StepEnd,
    StepMeasured,
)

GRAPHS = st.integers(0, 2)
LAYERS = st.integers(0, 3)
LARGEST = 64 * MIB


class Anything(RuleBasedStateMachine):
    """Knows one step before; then come events of any kind, with whole steps of that kind between them."""

    def __init__(self) -> None:
        super().__init__()
        op = Op((1e-3, 2e-3), [LARGEST], (LARGEST, LARGEST))
        self.step = build([[op] * 2] * 4, [MIB] * 4)
        self.budget = budget_between(profile(self.step), 0.3)
        self.policy = PlannedPolicy(self.budget, LINK)
        self.machine = Machine(self.policy, LINK, host=6 * LARGEST)
        self.machine.run(self.step)
        self.keys = 10**6
        self.number = 1000

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
        key = data.draw(st.sampled_from(list(self.machine.blocks)))
        self.machine.use(key)
        assert self.machine.blocks[key].place in (Place.DEVICE, Place.LEAVING)

    @precondition(lambda self: self.machine.blocks)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.machine.drop(data.draw(st.sampled_from(list(self.machine.blocks))))

    @rule(nbytes=st.integers(-LARGEST, LARGEST))
    def others(self, nbytes: int) -> None:
        self.machine.allocate(max(nbytes, self.resident - self.machine.level))

    @rule(nbytes=st.integers(1, 4 * LARGEST))
    def pressure(self, nbytes: int) -> None:
        """Of the answers the machine, which has no disk, does the releases."""
        while answer := self.policy.decide(HostPressure(nbytes)):
            assert {type(each) for each in answer} <= {Release, Spill}
            self.machine.act([each for each in answer if isinstance(each, Release)])

    @rule(key=st.integers(0, 10**6))
    def refused(self, key: int) -> None:
        assert self.policy.decide(Refused(Reload(key))) == ()

    @rule(stop=st.integers(0, 200), seed=st.integers(0, 3))
    def whole_step(self, stop: int, seed: int) -> None:
        """One that may end early, with some events left out."""
        rng = random.Random(seed)
        code = range(len(self.step.code))
        lost = [place for place in code if place > stop or (seed and rng.random() < 0.1)]
        self.machine.run(self.step, lost=lost)

    @property
    def resident(self) -> int:
        """The bytes of the blocks on the device."""
        blocks = self.machine.blocks.values()
        return sum(block.nbytes for block in blocks if block.place is not Place.HOST)

    @invariant()
    def knows_where_blocks_are(self) -> None:
        assert self.policy.resident == self.resident

    def teardown(self) -> None:
        machine = self.machine
        for key in list(machine.blocks):
            machine.use(key)
            assert machine.blocks[key].place in (Place.DEVICE, Place.LEAVING)
            machine.drop(key)
        assert machine.on_host == 0
        machine.allocate(-machine.level)
        machine.run(self.step)
        for _ in range(2):
            assert machine.run(self.step).peak <= self.budget + LARGEST


Anything.TestCase.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
TestAnything = Anything.TestCase

"""Steps whose layers are computed again, as a policy records them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial

from tests.policies.simulated.random_steps import MIB, RATE
from tests.policies.simulated.steps import Allocate, Compute, Drop, Layer, Op, Save, Step, Use, build, profile
from tiered_mem.policies import Dropped, Saved
from tiered_mem.policies.actions import How
from tiered_mem.policies.base import Event
from tiered_mem.policies.base import Used as UsedEvent
from tiered_mem.policies.planning.recording import StepNames
from tiered_mem.policies.planning.stitching import RecordedStep, Way, Ways

WAYS: tuple[Way, ...] = (None, "cheap", "full")


class Model:
    """Layers that can be treated. gradients: bytes of each layer. order: as `build` has it."""

    def __init__(self, layers: Sequence[Layer], gradients: int, order: Sequence[str] = ("F0", "B0")) -> None:
        self.layers = layers
        self._build = partial(build, layers, [gradients] * len(layers), order)

    def step(self, treated: Mapping[int, How] | None = None) -> Step:
        return self._build(treated=treated)

    def recorded(self, treated: Mapping[int, How] | None = None) -> RecordedStep:
        return recorded(self.step(treated))

    def all(self, way: Way) -> dict[int, How]:
        return {} if way is None else dict.fromkeys(range(len(self.layers)), way)

    @property
    def ways(self) -> Ways:
        return Ways({way: self.recorded(self.all(way)) for way in WAYS})


def recorded(step: Step) -> RecordedStep:
    """What a recording of the step gives, if nothing leaves the device. An optimizer follows it."""
    names, blocks, seen = StepNames(), [], []
    for each in step.code:
        event: Event
        match each:
            case Compute() | Allocate():
                continue
            case Save(block):
                saved = step.blocks[block]
                event = Saved(saved.graph, saved.layer, [(block, saved.nbytes)])
            case Use(block):
                event = UsedEvent(step.blocks[block].graph, step.blocks[block].layer, block)
            case Drop(block):
                event = Dropped([block])
            case _:
                event = each
        seen.append(names.event(event))
        if isinstance(each, Save):
            blocks.append(names.block(each.block))
    return RecordedStep(seen, [block for block in blocks if block is not None], profile(step))


def decoder(layers: int, size: int = 64 * MIB, seconds: float = 4e-3) -> Model:
    """Of each layer two products are dear, and what is between them takes half of the memory and little time."""
    dear = Op((seconds, 2 * seconds), [size], (size, size))
    cheap = Op((seconds / 10, seconds / 5), [size] * 2, (size, size), dear=False)
    return Model([[dear, cheap, dear]] * layers, 8 * MIB)


def small_model(seed: int) -> Model:
    """Three layers of two blocks each, of which one may be dear."""
    rng = random.Random(seed)
    layers: list[Layer] = []
    for _ in range(3):
        ops = []
        for dear in (True, rng.random() < 0.3):
            size = rng.choice([64, 128, 256]) * MIB
            seconds = size / RATE * rng.uniform(0.3, 2.0) * (1.0 if dear else 0.3)
            ops.append(Op((seconds, 2 * seconds), [size], (size, size), dear=dear))
        layers.append(ops)
    return Model(layers, rng.choice([0, 32]) * MIB)

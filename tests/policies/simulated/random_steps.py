"""Random steps of three kinds, the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.policies.simulated.steps import (
    Drop,
    Layer,
    Op,
    Step,
    Use,
    build,
    one_forward_one_backward,
)
from tiered_mem.policies.planning import Link

MIB = 1 << 20
RATE = 50e9  # bytes a second, to which the times of the layers are in proportion
LINK = Link(RATE, RATE, 1.0, 5e-6)


def small_nested(seed: int) -> Step:
    """A forward and a backward, with six to eight blocks."""
    rng = random.Random(seed)
    left = rng.choice([6, 7, 8])
    layers: list[Layer] = []
    while left > 0:
        ops = []
        for _ in range(min(left, rng.choice([1, 2]))):
            size = rng.choice([64, 128, 128, 256, 384]) * MIB
            seconds = size / RATE * rng.uniform(0.3, 2.5)
            ops.append(Op((seconds, 2 * seconds * rng.uniform(0.8, 1.2)), [size], (size, size)))
            left -= 1
        layers.append(ops)
    return build(layers, [rng.choice([0, 32, 128]) * MIB] * len(layers))


def small_pipeline(seed: int) -> Step:
    """Five microbatches of two blocks each, on a link that is too slow."""
    rng = random.Random(seed)
    layers: list[Layer] = []
    for _ in range(2):
        size = rng.choice([128, 256, 384]) * MIB
        seconds = size / RATE * rng.uniform(0.3, 0.9)
        layers.append([Op((seconds, 2 * seconds), [size], (size, size))])
    return build(layers, [0, 0], one_forward_one_backward(5, 3))


def nested(seed: int) -> Step:
    rng = random.Random(seed)
    return build(_layers(rng, rng.randint(2, 12)), [rng.randint(0, 64) * MIB for _ in range(12)])


def pipeline(seed: int) -> Step:
    rng = random.Random(seed)
    microbatches = rng.randint(2, 6)
    order = one_forward_one_backward(microbatches, rng.randint(1, min(4, microbatches)))
    return build(_layers(rng, rng.randint(1, 4)), [rng.randint(0, 64) * MIB for _ in range(4)], order)


def encoder_decoder(seed: int) -> Step:
    """Some blocks of the first half of the layers are first used by the second half, and dropped much later."""
    rng = random.Random(seed)
    count = rng.randint(2, 6)
    step = build(_layers(rng, 2 * count), [rng.randint(0, 64) * MIB for _ in range(2 * count)])
    shared = [b for b, block in enumerate(step.blocks) if block.layer < count]
    later = [each.block for each in step.code if isinstance(each, Use)]
    for block in rng.sample(shared, min(len(shared), 3)):
        # Used before another block that is saved after it, and dropped at its own place or later.
        before = rng.choice(later[: later.index(block) + 1])
        step.code.insert(step.code.index(Use(before)), Use(block))
        if rng.random() < 0.5:
            step.code.remove(Drop(block))
            step.code.append(Drop(block))
    return step


KINDS: dict[str, Callable[[int], Step]] = {
    "nested": nested,
    "pipeline": pipeline,
    "encoder-decoder": encoder_decoder,
}


def _layers(rng: random.Random, count: int) -> list[Layer]:
    pace = rng.choice([-1.2, -0.1, 0.5])  # from a link that is too slow to one that is fast
    return [[_op(rng, pace) for _ in range(rng.randint(1, 6))] for _ in range(count)]


def _op(rng: random.Random, pace: float) -> Op:
    sizes = [int(rng.lognormvariate(17.5, 1)) for _ in range(rng.randint(0, 3))]
    seconds = sum(sizes) / RATE * rng.lognormvariate(pace, 0.7) + rng.choice([0.0, 1e-5, 1e-4])
    work = int(rng.lognormvariate(17, 1)), int(rng.lognormvariate(17, 1))
    return Op((seconds, 2 * seconds * rng.uniform(0.7, 1.3)), sizes, work)

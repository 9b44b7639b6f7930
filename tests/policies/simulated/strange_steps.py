"""Steps as programs make them that do more than a forward and a backward."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from tests.policies.simulated.machine import backwards
from tests.policies.simulated.steps import Allocate, Compute, Drop, Instruction, Save, Step, Use
from tiered_mem.policies import LayerBegin


def twice(step: Step) -> Step:
    """The step with a second backward over the same blocks, as with retain_graph=True."""
    first = backwards(step)[0]
    again = [each for each in step.code[first:] if not isinstance(each, Drop | Allocate)]
    return Step(step.blocks, step.code[:first] + again + step.code[first:])


def coming_back(step: Step, layer: int) -> Step:
    """The backward of a layer stops after its first blocks, and goes on when that of the layer below is through."""
    places = [*backwards(step), len(step.code)]
    begin = next(i for i, place in enumerate(places) if step.code[place] == LayerBegin(0, layer, backward=True))
    start, below, after = places[begin : begin + 3]
    half = next(i for i in range(start, below) if isinstance(step.code[i], Drop)) + 1
    rest = [step.code[start], *step.code[half:below]]
    return Step(step.blocks, [*step.code[:half], *step.code[below:after], *rest, *step.code[after:]])


def threads(steps: Sequence[Step], seed: int) -> Step:
    """Steps at once, each in its own order, whose graphs are all in flight."""
    rng = random.Random(seed)
    both = Step()
    queues: list[list[Instruction]] = []
    graphs = 0
    for step in steps:
        first = len(both.blocks)
        queues.append([_renumbered(each, first, graphs) for each in step.code])
        both.blocks += [replace(block, graph=graphs + block.graph) for block in step.blocks]
        graphs += 1 + max(block.graph for block in step.blocks)
    while any(queues):
        queue = rng.choice([queue for queue in queues if queue])
        both.code.append(queue.pop(0))
    return both


def _renumbered(each: Instruction, blocks: int, graphs: int) -> Instruction:
    if isinstance(each, Save | Use | Drop):
        return replace(each, block=blocks + each.block)
    if isinstance(each, Compute | Allocate):
        return each
    return replace(each, graph=graphs + each.graph)

"""Training steps without a device: what the host issues, in its order, with the times and the memory of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tiered_mem.policies import ForwardBegin, ForwardEnd, LayerBegin, LayerEnd
from tiered_mem.policies.actions import How
from tiered_mem.policies.planning import Profile
from tiered_mem.policies.planning.profile import floor


@dataclass(frozen=True)
class Compute:
    """Work of the device that takes `work` bytes beside what is resident."""

    seconds: float
    work: int = 0


@dataclass(frozen=True)
class Allocate:
    """Memory that is no block comes; goes, with a negative number."""

    nbytes: int


@dataclass(frozen=True)
class Save:
    """A block is resident from here on."""

    block: int


@dataclass(frozen=True)
class Use:
    """Backward needs a block from here on."""

    block: int


@dataclass(frozen=True)
class Drop:
    """Nobody needs a block any more."""

    block: int


Instruction = Compute | Allocate | Save | Use | Drop | ForwardBegin | ForwardEnd | LayerBegin | LayerEnd


@dataclass(frozen=True)
class Block:
    """A saved tensor of a layer. Graphs are numbered from 0 in each step."""

    nbytes: int
    graph: int
    layer: int


@dataclass
class Step:
    """Blocks are numbered in the order of their saves."""

    blocks: list[Block] = field(default_factory=list)
    code: list[Instruction] = field(default_factory=list)

    @property
    def compute(self) -> float:
        """Seconds."""
        return sum(each.seconds for each in self.code if isinstance(each, Compute))

    def scaled(self, ratio: float) -> Step:
        """The step with other lengths: blocks, times and transient memory are `ratio` times as large."""
        blocks = [Block(int(block.nbytes * ratio), block.graph, block.layer) for block in self.blocks]
        code = [
            Compute(each.seconds * ratio, int(each.work * ratio)) if isinstance(each, Compute) else each
            for each in self.code
        ]
        return Step(blocks, code)


@dataclass(frozen=True)
class Op:
    """One operation of a layer. seconds, work: of its forward and of its backward. saves: bytes of its blocks.

    dear: it is kept where the layer is treated as "cheap".
    """

    seconds: tuple[float, float]
    saves: Sequence[int] = ()
    work: tuple[int, int] = (0, 0)
    dear: bool = True


Layer = Sequence[Op]
SMALL = 1 << 20
INPUT = 16 << 20


def build(
    layers: Sequence[Layer],
    gradients: Sequence[int],
    order: Sequence[str] = ("F0", "B0"),
    head: tuple[float, int] = (0.0, 0),
    small: int = SMALL,
    treated: Mapping[int, How] | None = None,
) -> Step:
    """A step of these layers. order: the forwards and backwards of its graphs. gradients: bytes of each layer,
    which are freed at the end.

    head: seconds and bytes of the logits. small: below so many bytes a saved tensor is no block.
    treated: layers that are computed again. Each keeps a block of INPUT bytes, and as it says dear operations.
    """
    step = Step()
    treated = treated or {}
    kept: dict[tuple[int, int, int], list[int]] = {}
    seen: set[int] = set()
    for each in order:
        graph = int(each[1:])
        if each[0] == "F":
            _forward(step, kept, graph, layers, small, treated)
            if any(head):
                step.code += [Compute(head[0], head[1]), Compute(2 * head[0], 2 * head[1])]
            continue
        for layer in reversed(range(len(layers))):
            step.code.append(LayerBegin(graph, layer, backward=True))
            how = treated.get(layer)
            if how is not None:
                step.code.append(Use(kept[graph, layer, -1][0]))
                again = [op for op in layers[layer] if not _is_kept(op, how)]
                for op in again:
                    step.code += [Compute(op.seconds[0], op.work[0]), Allocate(sum(op.saves))]
            for place in reversed(range(len(layers[layer]))):
                op = layers[layer][place]
                blocks = kept.pop((graph, layer, place))[::-1]
                step.code += map(Use, blocks)
                step.code.append(Compute(op.seconds[1], op.work[1]))
                step.code += map(Drop, blocks)
                gone = op.saves if not _is_kept(op, how) else [nbytes for nbytes in op.saves if nbytes < small]
                step.code.append(Allocate(-sum(gone)))
            if how is not None:
                step.code.append(Drop(kept.pop((graph, layer, -1))[0]))
            if layer not in seen:
                seen.add(layer)
                step.code.append(Allocate(gradients[layer]))
    step.code.append(Allocate(-sum(gradients[layer] for layer in seen)))
    return step


def _forward(
    step: Step,
    kept: dict[tuple[int, int, int], list[int]],
    graph: int,
    layers: Sequence[Layer],
    small: int,
    treated: Mapping[int, How],
) -> None:
    step.code.append(ForwardBegin(graph, len(layers)))
    for number, layer in enumerate(layers):
        step.code.append(LayerBegin(graph, number, inputs=INPUT))
        how = treated.get(number)
        if how is not None:
            kept[graph, number, -1] = [len(step.blocks)]
            step.code.append(Save(len(step.blocks)))
            step.blocks.append(Block(INPUT, graph, number))
        for place, op in enumerate(layer):
            if not _is_kept(op, how):
                kept[graph, number, place] = []
                step.code.append(Compute(op.seconds[0], max(op.work[0], sum(op.saves))))
                continue
            blocks = kept[graph, number, place] = []
            step.code += [Compute(op.seconds[0], max(op.work[0], sum(op.saves))), Allocate(sum(op.saves))]
            for nbytes in op.saves:
                if nbytes >= small:
                    blocks.append(len(step.blocks))
                    step.blocks.append(Block(nbytes, graph, number))
                    step.code += [Allocate(-nbytes), Save(blocks[-1])]
        step.code.append(LayerEnd(graph, number, unsaved_inputs=INPUT))
    step.code.append(ForwardEnd(graph))


def _is_kept(op: Op, how: How | None) -> bool:
    return how is None or (how == "cheap" and op.dear)


def one_forward_one_backward(microbatches: int, warm_up: int) -> list[str]:
    """The order of a pipeline's stage: `warm_up` forwards, then one backward and one forward in turn."""
    order = [f"F{graph}" for graph in range(warm_up)]
    for graph in range(microbatches):
        order.append(f"B{graph}")
        if graph + warm_up < microbatches:
            order.append(f"F{graph + warm_up}")
    return order


def profile(step: Step) -> Profile:
    """What a recording of the step gives, if nothing leaves the device."""
    seconds: list[float] = []
    unmovable: list[int] = []
    standing: list[int] = []
    blocks = range(len(step.blocks))
    saved, used, dropped, backward = ([-1 for _ in blocks] for _ in range(4))
    level = begun = 0
    for each in step.code:
        place = len(seconds)
        if isinstance(each, Compute):
            seconds[-1] += each.seconds
            unmovable[-1] = max(unmovable[-1], level + each.work)
            continue
        if isinstance(each, Allocate):
            level += each.nbytes
            if seconds:
                unmovable[-1] = max(unmovable[-1], level)
            continue
        if isinstance(each, Save):
            saved[each.block] = place
        elif isinstance(each, Use):
            if used[each.block] < 0:
                used[each.block], backward[each.block] = place, begun
        elif isinstance(each, Drop):
            dropped[each.block] = place
        elif isinstance(each, LayerBegin) and each.backward:
            begun = place
        seconds.append(0.0)
        unmovable.append(level)
        standing.append(level)
    return Profile(seconds, unmovable, [b.nbytes for b in step.blocks], saved, used, dropped, backward, standing)


def budget_between(step: Profile, share: float) -> int:
    """A budget so far on the way from the least possible, 0, to all that the step takes without offloading, 1."""
    least = floor(step.moments)
    return least + int((max(step.moments.full) - least) * share)

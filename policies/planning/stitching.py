"""A step whose layers are treated each in a way of its own, cut out of steps that were recorded."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from ..base import How
from .profile import Profile
from .recording import Name

# How a layer is treated; None keeps all that it saves.
Way = How | None
# Of each layer that does not keep all, by its number in its forward.
Choice = Mapping[int, How]


class Backward(NamedTuple):
    """A layer where its backward begins. In bytes, of the device.

    standing: allocated then, beside blocks. above: the most that comes beside what it has saved. forward: the most
    that came in its forward. saved: its blocks. largest: of these one. borrowed: blocks of layers before it that it
    is the first to use.
    """

    standing: int
    above: int
    forward: int
    saved: int
    largest: int
    borrowed: int

    def coming(self, inputs: int, *, trial: bool) -> int:
        """The most that comes while the layer is computed again and keeps nothing but its inputs.

        That is what its forward takes, and then what its backward does, with all that it has saved there at once. A
        trial has one of these twice then. inputs: the bytes that the layer is called with.
        """
        again = self.borrowed + self.saved + self.above
        return max(inputs + self.forward, again + (self.largest if trial else 0))


@dataclass(frozen=True)
class RecordedStep:
    """A step, by its positions: their names, the blocks in the order of their saves, and its profile.

    Its parts go from where a layer begins its forward, or for the first time its backward, to the next of
    these. The first part comes before all layers, the last after all blocks, as the optimizer's step does.
    """

    names: Sequence[Name]
    blocks: Sequence[Name]
    profile: Profile

    @cached_property
    def cuts(self) -> list[int]:
        """The positions at which its parts begin, and the end."""
        end = len(self.names)
        return [0, *self._begins, max([0, end - 1, *(k + 1 for k in self._begins[-1:])]), end]

    @cached_property
    def layers(self) -> list[tuple[str, int, int] | None]:
        """Of each part "forward" or "backward", its graph and its layer. None for the first and the last part."""
        return [None, *(self.names[k][:3] for k in self._begins), None]

    @property
    def standing(self) -> Sequence[int]:
        return self.profile.standing or self.profile.unmovable

    @cached_property
    def levels(self) -> list[int]:
        """The bytes that are on the device before each position and at the end, if no block ever leaves."""
        change = [0] * (len(self.names) + 1)
        profile = self.profile
        for n, s, d in zip(profile.nbytes, profile.saved, profile.dropped, strict=True):
            change[s] += n
            change[d] -= n
        alive = [0, *accumulate(change)]
        return list(map(int.__add__, [*self.standing, *self.standing[-1:]], alive))

    def backwards(self) -> dict[int, Backward]:
        """What there is to say of each layer that begins its backward: the most of it, over all graphs."""
        forwards: dict[tuple[int, int], tuple[int, int, int]] = {}
        found: dict[int, Backward] = {}
        used: list[list[int]] = [[] for _ in self.layers]
        for b, first in enumerate(self.profile.used):
            used[self.part_of(first)].append(b)
        for part, (of, (a, z)) in enumerate(zip(self.layers, pairwise(self.cuts), strict=True)):
            if of is None or a == z:
                continue
            kind, graph, layer = of
            # Up to the forward's end, and to the last use of what it has saved: what follows is not the layer's.
            last = "end" if kind == "forward" else "used"
            z = next((k for k in reversed(range(a, z)) if self.names[k][0] == last), z)
            above = max(0, max(self.profile.full[a:z], default=0) - self.levels[a])
            if kind == "forward":
                nbytes = [self.profile.nbytes[b] for b in self.saved[part]]
                forwards[graph, layer] = above, sum(nbytes), max(nbytes, default=0)
            else:
                borrowed = sum(self.profile.nbytes[b] for b in used[part] if self.blocks[b][:2] != (graph, layer))
                new = Backward(self.standing[a], above, *forwards.get((graph, layer), (0, 0, 0)), borrowed)
                found[layer] = Backward(*map(max, new, found.get(layer, new)))
        return found

    def part_of(self, position: int) -> int:
        return bisect_right(self.cuts, position, hi=len(self.cuts) - 1) - 1

    @cached_property
    def _begins(self) -> list[int]:
        begin = ("forward", "backward")
        return [k for k, name in enumerate(self.names) if name[0] in begin and name[3] == 0]

    @cached_property
    def saved(self) -> list[list[int]]:
        """The blocks that each part saves, in their order."""
        found: list[list[int]] = [[] for _ in self.layers]
        for b, saved in enumerate(self.profile.saved):
            found[self.part_of(saved)].append(b)
        return found

    @cached_property
    def seconds(self) -> list[float]:
        """Of each part."""
        return [sum(self.profile.seconds[a:z]) for a, z in pairwise(self.cuts)]


@dataclass(frozen=True)
class Ways:
    """One step, recorded once for each way in which all its layers can be treated. None, which keeps all, is one.

    Raises ValueError where the layers of the steps do not begin in the same order.
    """

    steps: Mapping[Way, RecordedStep]

    def __post_init__(self) -> None:
        if any(step.layers != self.layers for step in self.steps.values()):
            raise ValueError("steps whose layers are treated in different ways go through them in other orders")

    @property
    def layers(self) -> list[tuple[str, int, int] | None]:
        """Of each part, as a `RecordedStep` has them."""
        return self.steps[None].layers

    def way(self, part: int, choice: Choice) -> Way:
        """How a part goes if each layer is treated as `choice` has it."""
        of = self.layers[part]
        how = None if of is None else choice.get(of[2])
        return how if how in self.steps else None

    def stitched(self, choice: Choice) -> RecordedStep:
        """The step with these layers treated so, while the others keep all.

        Each part is cut out of the step in which its layer was treated so. What others have allocated goes on from
        one part to the next: a part brings its changes with it, and not its level.
        """
        return _Stitching(self, [self.way(part, choice) for part in range(len(self.layers))]).step()


class _Stitching:
    """chosen: the way of each part."""

    def __init__(self, ways: Ways, chosen: Sequence[Way]) -> None:
        self._chosen = chosen
        self._steps = ways.steps
        self._blocks = [(way, b) for part, way in enumerate(chosen) for b in ways.steps[way].saved[part]]
        self._names: list[Name] = []
        self._seconds: list[float] = []
        self._unmovable: list[int] = []
        self._standing: list[int] = []
        # Of each part its first position, and the end; of each step the new places of its positions.
        self._begins: list[int] = []
        self._places = {way: [-1] * len(step.names) for way, step in ways.steps.items()}

    def step(self) -> RecordedStep:
        blocks = [self._steps[way].blocks[b] for way, b in self._blocks]
        own = set(blocks)
        level = self._steps[self._chosen[0]].standing[0]
        for part, way in enumerate(self._chosen):
            level = self._add(part, way, level, own)
        self._begins.append(len(self._names))
        lives = [self._life(way, b) for way, b in self._blocks]
        nbytes, saved, used, dropped, backward, loose = map(list, zip(*lives, strict=True)) if lives else [[]] * 6
        profile = Profile(
            self._seconds, self._unmovable, nbytes, saved, used, dropped, backward, self._standing, loose
        )
        return RecordedStep(self._names, blocks, profile)

    def _add(self, part: int, way: Way, level: int, own: Collection[Name]) -> int:
        """Adds a part, before which others have `level` bytes. Returns the bytes that they have after it."""
        step = self._steps[way]
        profile, standing, places = step.profile, step.standing, self._places[way]
        begin, end = step.cuts[part], step.cuts[part + 1]
        self._begins.append(len(self._names))
        if begin == end:
            return level
        # A layer that is computed again does not take less time for it: that it did was chance.
        longer = max(1.0, self._steps[None].seconds[part] / max(step.seconds[part], 1e-12))
        shift = level - standing[begin]
        for k in range(begin, end):
            name = step.names[k]
            if k > begin and name[0] in ("used", "dropped") and name[1] not in own:
                # Of a block that is not there, as its layer is treated otherwise.
                self._seconds[-1] += profile.seconds[k] * longer
                self._unmovable[-1] = max(self._unmovable[-1], profile.unmovable[k] + shift)
            else:
                self._names.append(name)
                self._seconds.append(profile.seconds[k] * longer)
                self._unmovable.append(max(0, profile.unmovable[k] + shift))
                self._standing.append(max(0, standing[k] + shift))
            places[k] = len(self._names) - 1
        return standing[end] + shift if end < len(standing) else level

    def _life(self, way: Way, b: int) -> tuple[int, int, int, int, int, int]:
        profile = self._steps[way].profile
        saved = self._places[way][profile.saved[b]]
        used = max(saved + 1, self._place(way, profile.used[b]))
        dropped = max(used, self._place(way, profile.dropped[b], last=True))
        backward = max(saved + 1, min(used, self._place(way, profile.backward[b])))
        loose = profile.loose[b] if profile.loose else profile.saved[b] + 1
        return profile.nbytes[b], saved, used, dropped, backward, max(saved + 1, self._place(way, loose, last=True))

    def _place(self, way: Way, position: int, *, last: bool = False) -> int:
        """Where a position of a step is now. In a part that is another step's it is its first, or its last."""
        step = self._steps[way]
        if position == len(step.names):
            return self._begins[-1]
        if (place := self._places[way][position]) >= 0:
            return place
        part = step.part_of(position)
        return self._begins[part + 1] - 1 if last else self._begins[part]

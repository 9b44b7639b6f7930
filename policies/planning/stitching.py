"""A step whose layers are treated each in a way of its own, cut out of steps that were recorded."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from ..actions import How
from .profile import Profile
from .recording import Name, earlier_lives

# How a layer is treated; None keeps all that it saves.
Way = How | None
# Of each layer that does not keep all, by its number in its forward.
Choice = Mapping[int, How]
# Of events, how far memory rises above where it began, and the bytes of blocks that are gone by then.
Rises = frozenset[tuple[int, int]]


class Backward(NamedTuple):
    """A layer where its backward begins. In bytes, of the device.

    standing: allocated then, beside blocks that can leave. full: with them. forward: the most that came in its
    forward.
    saved: its blocks. borrowed: blocks of layers before it that it is the first to use.
    rises: of each event of its backward, how far it rises above where it began, and the blocks that are gone by
    then. twice: the same at each use of a block, if that is there twice.
    """

    standing: int
    full: int
    forward: int
    saved: int
    borrowed: int
    rises: Rises
    twice: Rises

    def or_more(self, other: Backward) -> Backward:
        """What there is at most, of two backwards."""
        standing, full, forward, saved, borrowed = map(max, self[:5], other[:5])
        rises, twice = self.rises | other.rises, self.twice | other.twice
        return Backward(standing, full, forward, saved, borrowed, rises, twice)

    def coming(self, inputs: int, held: int, *, trial: bool, beside: int = 0, stays: float = 0) -> int:
        """The most that comes while the layer is computed again.

        That is what its forward takes, and then what its backward does, with all that it has saved there at once. A
        trial has each of these twice when it is used.

        inputs: the bytes that the layer is called with. held: of these what it does not save.
        beside: of results that it is given, what it does not save. stays: what it does, and has to the end then.
        """
        rises = self.rises | self.twice if trial else self.rises
        above = max((rise + min(gone, stays) for rise, gone in rises), default=0)
        return beside + max(inputs + self.forward, held + self.borrowed + self.saved + int(above))


@dataclass(frozen=True)
class RecordedStep:
    """A step, by its positions: their names, the blocks in the order of their saves, and its profile.

    treated: the layers that were computed again in it; None is all of them, if any.

    Its parts go from where a layer begins its forward, or for the first time its backward, to the next of
    these. The first part comes before all layers, the last after all blocks, as the optimizer's step does.
    """

    names: Sequence[Name]
    blocks: Sequence[Name]
    profile: Profile
    treated: Collection[int] | None = None

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
        forwards: dict[tuple[int, int], tuple[int, int]] = {}
        found: dict[int, Backward] = {}
        nbytes = self.profile.nbytes
        for part, (of, (a, z)) in enumerate(zip(self.layers, pairwise(self.cuts), strict=True)):
            if of is None or a == z:
                continue
            kind, graph, layer = of
            # Up to the forward's end, and to the last use of what it has saved. What follows that use is the
            # layer's too where the next one's backward comes after it, and not all else.
            last = "end" if kind == "forward" else "used"
            z = next((k for k in reversed(range(a, z)) if self.names[k][0] == last), z)
            z += kind == "backward" and (self.layers[part + 1] or ())[:2] == of[:2]
            if kind == "forward":
                above = max(0, max(self.profile.full[a:z], default=0) - self.levels[a])
                forwards[graph, layer] = above, sum(nbytes[b] for b in self.saved[part])
            else:
                borrowed = sum(nbytes[b] for b in self._used[part] if self.blocks[b][:2] != (graph, layer))
                forward, saved = forwards.get((graph, layer), (0, 0))
                standing = self.standing[a] + self._stuck(a, self._used[part])
                sizes = standing, self.levels[a], forward, saved, borrowed
                new = Backward(*sizes, *self._rises(part, a, z))
                found[layer] = new.or_more(found.get(layer, new))
        return found

    def _stuck(self, position: int, used: Collection[int]) -> int:
        """The bytes of other blocks than those used now that cannot leave by then, as somebody else has them."""
        profile = self.profile
        there = (b for b in self._late if profile.saved[b] <= position < min(profile.loose[b], profile.dropped[b]))
        return sum(profile.nbytes[b] for b in there if b not in used)

    def _rises(self, part: int, begin: int, end: int) -> tuple[Rises, Rises]:
        """Of a layer's backward, as a `Backward` has them."""
        nbytes, level = self.profile.nbytes, self.levels[begin]
        uses = {self.profile.used[b]: nbytes[b] for b in self._used[part]}
        rises, twice = {(0, 0)}, {(0, 0)}
        gone = 0
        for k in range(begin, end):
            if k in uses:
                twice.add((self.levels[k] + uses[k] - level, gone))
            gone += self._ends[k]
            rises.add((self.profile.full[k] - level, gone))
        return frozenset(rises), frozenset(twice)

    def rises(self) -> dict[int, int]:
        """How far memory rises at most from a use in a layer's backward to the next event, for each layer.

        Between these a layer is computed again as "full", and goes through its backward.
        """
        found: dict[int, int] = {}
        transient = self.profile.transient
        for of, (a, z) in zip(self.layers, pairwise(self.cuts), strict=True):
            if of is not None and of[0] == "backward":
                at_uses = (transient[k] for k in range(a, z) if self.names[k][0] == "used")
                found[of[2]] = max(at_uses, default=0)
        return found

    def part_of(self, position: int) -> int:
        return bisect_right(self.cuts, position, hi=len(self.cuts) - 1) - 1

    @cached_property
    def _begins(self) -> list[int]:
        begin = ("forward", "backward")
        return [k for k, name in enumerate(self.names) if name[0] in begin and name[3] == 0]

    @cached_property
    def _late(self) -> list[int]:
        """The blocks that somebody else still has when the first backward begins."""
        first = next((k for k, name in enumerate(self.names) if name[0] == "backward"), len(self.names))
        return [b for b, loose in enumerate(self.profile.loose) if loose > first]

    @cached_property
    def _ends(self) -> Counter[int]:
        """The bytes of the blocks that end at each position."""
        ends: Counter[int] = Counter()
        for dropped, nbytes in zip(self.profile.dropped, self.profile.nbytes, strict=True):
            ends[dropped] += nbytes
        return ends

    @cached_property
    def _used(self) -> list[list[int]]:
        """The blocks that each part is the first to use."""
        return self._by_part(self.profile.used)

    @cached_property
    def saved(self) -> list[list[int]]:
        """The blocks that each part saves, in their order."""
        return self._by_part(self.profile.saved)

    def _by_part(self, positions: Sequence[int]) -> list[list[int]]:
        """The blocks of each part, in their order. positions: of each block one."""
        found: list[list[int]] = [[] for _ in self.layers]
        for b, position in enumerate(positions):
            found[self.part_of(position)].append(b)
        return found

    @cached_property
    def seconds(self) -> list[float]:
        """Of each part."""
        return [sum(self.profile.seconds[a:z]) for a, z in pairwise(self.cuts)]

    def later(self, late: Sequence[float]) -> RecordedStep:
        """The same with parts that are so many seconds longer each, in the longest pause that each has."""
        seconds = list(self.profile.seconds)
        for (a, z), more in zip(pairwise(self.cuts), late, strict=True):
            if a < z:
                longest = max(range(a, z), key=seconds.__getitem__)
                seconds[longest] = max(0.0, seconds[longest] + more)
        return replace(self, profile=replace(self.profile, seconds=seconds))


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

    def as_measured(self, measured: RecordedStep, choice: Choice) -> Ways:
        """The same with the times of a step that was measured, in which each layer was treated as `choice` has it.

        By how much each of its parts was longer or shorter than was to be expected, that part is in all ways. It is
        what a step waits for others, as ranks of a pipeline do, however its layers are treated.
        """
        expected = self.stitched(choice)
        if measured.layers != expected.layers:
            return self
        late = list(map(float.__sub__, measured.seconds, expected.seconds))
        return Ways({way: step.later(late) for way, step in self.steps.items()})

    def of(self, layer: int) -> set[Way]:
        """How a layer can be treated: as it was in a step that was recorded."""
        return {
            way for way, step in self.steps.items() if way is None or step.treated is None or layer in step.treated
        }

    def way(self, part: int, choice: Choice) -> Way:
        """How a part goes if each layer is treated as `choice` has it."""
        of = self.layers[part]
        how = None if of is None else choice.get(of[2])
        return how if of is not None and how in self.of(of[2]) else None

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
        fates = nbytes, saved, used, dropped, backward
        earlier = earlier_lives(blocks)
        profile = Profile(self._seconds, self._unmovable, *fates, self._standing, loose, earlier)
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

"""A rank's step in parts, each in all ways in which its layer can be treated, without what it waits for others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tiered_mem.policies.planning.recording import Name, whole
from tiered_mem.policies.planning.stitching import RecordedStep, Way

from .rank_step import Act, RankStep

# Of each part: where it begins, where the most is on the device, the last save, the first use, the last end of a
# block, and others between these.
MOMENTS = 5
_CUTS = ("begin", "forward", "backward")

Layer = tuple[int, int]  # a graph, and a layer of it


@dataclass(frozen=True)
class Moment:
    """seconds: until the next one. above: how many bytes more than at the part's beginning there are on the device
    then and just before, at most, if no block leaves."""

    seconds: float
    above: int


@dataclass(frozen=True)
class PartWay:
    """A part as it goes in one way.

    change: by which it changes the bytes on the device, if no block leaves. end: how many more than at its
    beginning there are just before the next part.
    """

    moments: Sequence[Moment]
    change: int
    end: int


@dataclass(frozen=True)
class Part:
    """layer: whose forward or backward it is; none where that can go in one way alone.

    lead: seconds from the act's beginning, where it is the act's first.
    """

    layer: Layer | None
    lead: float
    ways: Mapping[Way, PartWay]


@dataclass(frozen=True)
class Life:
    """What lies between two uses of a block, or between its save and its first use; the first is number 0.

    It is there where its layer goes in this way. saved: the first moment at which it was saved. loose: the first at
    which it may be away. used: the first at which it must be back. returns: whether it must; if not, nobody uses it
    any more, and it is dropped then. Moments are numbered through the rank's step. group: of its block, the graph
    and whether that has several lives.
    """

    group: tuple[int, bool]
    layer: Layer
    way: Way
    number: int
    nbytes: int
    saved: int
    loose: int
    used: int
    returns: bool


@dataclass(frozen=True)
class StepInParts:
    """acts: with the parts of each. level: the bytes that are on the device when it begins."""

    acts: Sequence[tuple[Act, Sequence[Part]]]
    lives: Sequence[Life]
    level: int


def in_parts(rank: RankStep) -> StepInParts:
    """Raises ValueError where the step goes through its layers in another order in one of the ways."""
    cut = {way: _Cut.of(step) for way, step in rank.steps.items()}
    plain = cut[None]
    if any(each.keys != plain.keys for each in cut.values()):
        raise ValueError("steps whose layers are treated in different ways go through them in other orders")
    clock = rank.steps[None].profile.clock
    owners = _owners(rank.acts, plain.begins)
    # When each part begins and ends, without what is waited for before its act and after it. The last one goes to
    # the end of its act.
    times = [*(clock[k] for k in plain.begins[:-1]), float("inf")]
    spans = [
        (min(max(a, rank.acts[act].begin), rank.acts[act].end), min(z, rank.acts[act].end))
        for (a, z), act in zip(pairwise(times), owners, strict=True)
    ]
    inner = [owners[n + 1] == act for n, act in enumerate(owners[:-1])] + [False]
    extra = {way: _extra(plain, each, inner) for way, each in cut.items()}
    acts: list[tuple[Act, list[Part]]] = [(act, []) for act in rank.acts]
    for n, act in enumerate(owners):
        begin, end = spans[n]
        layer = plain.layers[n] if len(cut) > 1 else None
        ways: dict[Way, PartWay] = {}
        for way, each in cut.items():
            if way is None or (layer is not None and each.treats(layer)):
                ways[way] = each.part(n, end - begin + extra[way][n])
        acts[act][1].append(Part(layer, max(0.0, begin - rank.acts[act].begin), ways))
    lives = [life for way, each in cut.items() for life in each.lives(way, treatable=len(cut) > 1)]
    return StepInParts(acts, lives, rank.steps[None].levels[0])


def _owners(acts: Sequence[Act], begins: Sequence[int]) -> list[int]:
    """Of each part the act that it belongs to."""
    found = []
    act = 0
    for begin in begins[:-1]:
        while act + 1 < len(acts) and acts[act + 1].first <= begin:
            act += 1
        found.append(act)
    return found


def _extra(plain: _Cut, other: _Cut, inner: Sequence[bool]) -> list[float]:
    """By how many seconds each part is longer in another way.

    What comes after an act's last part may be a wait: that one is taken for as much longer as the least of the
    others of its kind.
    """
    longer = [max(0.0, b - a) for a, b in zip(plain.seconds, other.seconds, strict=True)]
    least: defaultdict[object, float] = defaultdict(lambda: float("inf"))
    for key, more, inside in zip(plain.keys, longer, inner, strict=True):
        if inside:
            least[key[0]] = min(least[key[0]], more)
    return [
        more if inside else least.get(key[0], 0.0)
        for key, more, inside in zip(plain.keys, longer, inner, strict=True)
    ]


@dataclass(frozen=True)
class _Cut:
    """A step, and the positions at which its parts begin; the last is where the last one ends."""

    step: RecordedStep
    begins: Sequence[int]
    keys: Sequence[Name]

    @classmethod
    def of(cls, step: RecordedStep) -> _Cut:
        begins = [k for k, name in enumerate(step.names) if name[0] in _CUTS]
        # What follows the last use of a block, such as an optimizer's step, is no part of it.
        end = 1 + max([k for k, name in enumerate(step.names) if name[0] == "used"], default=begins[-1])
        return cls(step, [*begins, end], [step.names[k] for k in begins])

    @property
    def seconds(self) -> list[float]:
        clock = self.step.profile.clock
        return [clock[z] - clock[a] for a, z in pairwise(self.begins)]

    @property
    def layers(self) -> list[Layer | None]:
        return [None if key[0] == "begin" else (key[1], key[2]) for key in self.keys]

    def treats(self, layer: Layer) -> bool:
        return self.step.treated is None or layer[1] in self.step.treated

    def picked(self, part: int) -> list[int]:
        """The positions of its moments."""
        begin, end = self.begins[part], self.begins[part + 1]
        full, clock, names = self.step.profile.full, self.step.profile.clock, self.step.names
        inside = range(begin + 1, end)
        picked = {begin, max(inside, key=full.__getitem__, default=begin)}
        for kind, there in (("saved", reversed(inside)), ("used", iter(inside)), ("dropped", reversed(inside))):
            picked.add(next((k for k in there if names[k][0] == kind), begin))
        while len(picked) < min(MOMENTS, end - begin):
            places = sorted(picked)
            a, z = max(
                pairwise([*places, end]), key=lambda gap: (gap[1] - gap[0] > 1) * (clock[gap[1]] - clock[gap[0]])
            )
            halfway = (clock[a] + clock[z]) / 2
            rest = [k for k in range(begin, end) if k not in picked]
            picked.add(min(rest, key=lambda k: abs(clock[k] - halfway)))
        return sorted([*picked, *[max(picked)] * (MOMENTS - len(picked))])

    def part(self, n: int, seconds: float) -> PartWay:
        """seconds: its own, without what is waited for in it."""
        positions = self.picked(n)
        profile, levels = self.step.profile, self.step.levels
        clock, begin = profile.clock, positions[0]
        times = [*(min(seconds, clock[k] - clock[begin]) for k in positions), seconds]
        moments = [
            Moment(z - a, max(profile.full[max(begin, k - 1) : k + 1]) - levels[begin])
            for k, (a, z) in zip(positions, pairwise(times), strict=True)
        ]
        end = self.begins[n + 1]
        return PartWay(moments, levels[end] - levels[begin], profile.full[end - 1] - levels[begin])

    def lives(self, way: Way, *, treatable: bool) -> list[Life]:
        """Those of all blocks, where layers are treated in this way."""
        profile, blocks = self.step.profile, self.step.blocks
        count: defaultdict[Name, int] = defaultdict(int)
        for name in blocks:
            count[whole(name)] += 1
        positions = [k for part in range(len(self.keys)) for k in self.picked(part)]  # of all moments
        loose = profile.loose or [saved + 1 for saved in profile.saved]
        found = []
        for b, name in enumerate(blocks):
            used = profile.used[b]
            there = self._moment(positions, used)
            if treatable and self.layers[there // MOMENTS if there < len(positions) else -1] != name[:2]:
                there = self._after(used)  # which may be treated otherwise, and use it later
            found.append(
                Life(
                    (name[0], count[whole(name)] > 1),
                    (name[0], name[1]),
                    way,
                    name[3] if len(name) > 3 else 0,
                    profile.nbytes[b],
                    self._moment(positions, profile.saved[b] + 1),
                    self._moment(positions, loose[b]),
                    there,
                    used < profile.dropped[b],
                )
            )
        return found

    @staticmethod
    def _moment(positions: Sequence[int], position: int) -> int:
        """The first moment at this position or later."""
        return next((m for m, k in enumerate(positions) if k >= position), len(positions))

    def _after(self, position: int) -> int:
        """The first moment of the next part."""
        return MOMENTS * next((n for n, begin in enumerate(self.begins[:-1]) if begin > position), len(self.keys))

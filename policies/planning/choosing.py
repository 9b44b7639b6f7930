"""Chooses for each layer of a step whether it keeps all, or is computed again and how."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, permutations, product, repeat
from math import inf
from typing import NamedTuple

from ..base import How
from .disk_and_states import StatesShare
from .planner import plan
from .profile import BudgetTooSmall, Link, least_bytes, least_time
from .stitching import Choice, RecordedStep, Way, Ways

_HOWS: tuple[How, How] = ("full", "cheap")
# Layers are looked at in so many groups at most, of layers that follow each other.
_GROUPS = 32
# It begins to search from each number of groups in each way, by this part of all of them.
_COUNTS = 12
# So many blocks are planned for, in all attempts together.
_EFFORT = 12_000
# Attempts of each plan that is compared.
_ATTEMPTS = 3
# So many times the time of copying them count bytes for which there is no room, whatever leaves.
_IMPOSSIBLE = 1000
# Of a step's time: what differs by less is the same. Then the one counts that computes less again.
_SAME = 1e-4


@dataclass(frozen=True)
class Chosen:
    """How the layers are treated, the bytes of optimizer states that stay on the device, and the seconds then.

    before: the seconds with the treatment that there was.
    """

    choice: Choice
    kept: int
    seconds: float
    before: float


def choose(ways: Ways, budget: int, link: Link, states: StatesShare, layers: Sequence[int], now: Choice) -> Chosen:
    """The treatment of the layers with which the step is the shortest, with the plan that it then has.

    Blocks that are kept may still leave, in copies that hide behind compute, as far as they do. Layers that are
    computed again take the time of that, and leave less to move. What is left of the budget optimizer states may
    have, which else cross the link while nothing hides it.

    It searches by a bound that takes an instant, over groups of layers, and then by plans, near to the best.
    layers: the numbers of those that may be treated. now: how they are treated before that.
    Raises BudgetTooSmall where no choice keeps the budget.
    """
    return _Search(ways, budget, link, states, layers).best(now)


class _Point(NamedTuple):
    """The way of each group of layers, and the bytes of states that are kept."""

    ways: tuple[Way, ...]
    kept: int


class _Search:
    def __init__(self, ways: Ways, budget: int, link: Link, states: StatesShare, layers: Sequence[int]) -> None:
        self._ways = ways
        self._budget = budget
        self._link = link
        self._states = states
        size = -(-len(layers) // _GROUPS)
        self._groups = [layers[k : k + size] for k in range(0, len(layers), size)] if layers else []
        # Of each group, how all of its layers can be treated.
        self._allowed = [set.intersection(*map(ways.of, group)) for group in self._groups]
        self._room = max(0, min(states.total, budget - states.rounding - states.step_peak))
        self._outline = Outline(ways, link, {layer: n for n, group in enumerate(self._groups) for layer in group})
        # Of very many blocks it is one that has time.
        self._attempts = max(1, min(_ATTEMPTS, _EFFORT // (4 * (1 + len(ways.steps[None].blocks)))))
        self._exact: dict[_Point, float] = {}
        self._failed: BudgetTooSmall | None = None

    def best(self, now: Choice) -> Chosen:
        there = tuple([now.get(group[0]) for group in self._groups])
        before = min((_Point(there, kept) for kept in (0, self._room)), key=self._guess)
        begun = self._descend(
            min([before, *self._seeds()], key=self._guess), self._guess, _halves(len(self._groups))
        )
        plans = _EFFORT // (_ATTEMPTS * (1 + len(self._ways.steps[None].blocks)))
        found = self._descend(min(begun, before, key=self._planned), self._planned, [1], plans)
        if self._failed is not None and self._planned(found) == inf:
            raise self._failed
        return Chosen(self._choice(found), found.kept, self._planned(found), self._planned(before))

    def _seeds(self) -> Iterator[_Point]:
        """Points all over: the first groups are "full", those after them "cheap", and the last keep all."""
        groups = len(self._groups)
        counts = sorted({groups * k // _COUNTS for k in range(_COUNTS + 1)})
        full, cheap = (counts if way in self._ways.steps else [0] for way in _HOWS)
        for f, c in product(full, cheap):
            if f + c <= groups:
                kinds: list[tuple[Way, int]] = [("full", f), ("cheap", c), (None, groups - f - c)]
                wanted = chain.from_iterable(repeat(way, count) for way, count in kinds)
                may = zip(wanted, self._allowed, strict=True)
                ways = tuple([way if way in allowed else None for way, allowed in may])
                for kept in {0, self._room // 2, self._room}:
                    yield _Point(ways, kept)

    def _descend(
        self, point: _Point, cost: Callable[[_Point], float], sizes: Sequence[int], most: float = inf
    ) -> _Point:
        """Goes from a point to better ones near it, in steps of these sizes, and looks at so many at most."""
        least = cost(point)
        for size in sizes:
            better = True
            while better:
                better = False
                for other in self._near(point, size):
                    if most <= 0:
                        return point
                    most -= 1
                    if (seconds := cost(other)) < least * (1 - _SAME):
                        point, least, better = other, seconds, True
                        break
        return point

    def _near(self, point: _Point, size: int) -> Iterator[_Point]:
        """Points in which so many groups are treated otherwise, or as large a part of the states stays or goes."""
        for old, new in permutations(self._ways.steps, 2):
            there = [n for n, way in enumerate(point.ways) if way == old and new in self._allowed[n]]
            if len(there) >= size:
                for some in _picks(there, size):
                    ways = tuple([new if n in some else way for n, way in enumerate(point.ways)])
                    yield point._replace(ways=ways)
        part = self._room * size // max(1, len(self._groups))
        for kept in (min(self._room, point.kept + part), max(0, point.kept - part)):
            if kept != point.kept:
                yield point._replace(kept=kept)

    def _guess(self, point: _Point) -> float:
        return self._outline.seconds(point.ways, self._budget - point.kept) + self._crossing(point)

    def _planned(self, point: _Point) -> float:
        if point not in self._exact:
            step = self._ways.stitched(self._choice(point))
            try:
                made = plan(step.profile, self._budget - point.kept, self._link, attempts=self._attempts)
                self._exact[point] = made.seconds + self._crossing(point)
            except BudgetTooSmall as error:
                self._failed = error
                self._exact[point] = inf
        return self._exact[point]

    def _crossing(self, point: _Point) -> float:
        """The seconds in which the states cross the link that are not kept."""
        return self._link.exchange(self._states.total - point.kept) if self._states.total else 0.0

    def _choice(self, point: _Point) -> Choice:
        ways = zip(self._groups, point.ways, strict=True)
        return {layer: way for group, way in ways if way is not None for layer in group}


def _halves(count: int) -> list[int]:
    halves = [max(1, count)]
    while halves[-1] > 1:
        halves.append(halves[-1] // 2)
    return halves


def _picks(there: Sequence[int], size: int) -> Iterator[frozenset[int]]:
    """So many of some groups: the last, the last but one and those before it, the first, and evenly spread."""
    yield frozenset(there[len(there) - size :])
    if size < len(there):
        yield frozenset(there[len(there) - size - 1 : -1])
        yield frozenset(there[:size])
        yield frozenset(there[int((k + 0.5) * len(there) / size)] for k in range(size))


class Outline:
    """A step by groups of layers, for a bound of its time that takes an instant.

    It is `least_seconds` with a moment for the forward and one for the backward of each group. group: of each layer
    that may be treated.
    """

    def __init__(self, ways: Ways, link: Link, group: Mapping[int, int]) -> None:
        self._link = link
        self._group: list[int | None] = []  # of each moment
        place: list[int] = []  # the moment of each part
        before: tuple[object, ...] | None = None
        for part, of in enumerate(ways.layers):
            known = None if of is None else group.get(of[2])
            key = (part,) if of is None or known is None else (*of[:2], known)
            if key != before:
                self._group.append(known)
                before = key
            place.append(len(self._group) - 1)
        self._moments = {
            way: _moments(step, ways.steps[None], place, len(self._group)) for way, step in ways.steps.items()
        }
        self._begin = ways.steps[None].standing[0]

    def seconds(self, ways: Sequence[Way], budget: int) -> float:
        """The least time of the step within a budget, with each group treated so; more where it cannot keep it."""
        moments = [self._moments[None if n is None else ways[n]][k] for k, n in enumerate(self._group)]
        later = sum([moment.used for moment in moments])
        level = standing = self._begin
        lacking = 0
        stretches = []
        for seconds, change, high, stands, least, saved, used in moments:
            stretches.append((seconds, level + high - budget, saved, used))
            lacking = max(lacking, standing + least - budget)
            level += change
            standing += stands
        return least_time(stretches, later, self._link) + _IMPOSSIBLE * lacking / self._link.out


class _Stretch(NamedTuple):
    """A part of a step.

    seconds: its time. change, high: the bytes by which it changes what is on the device, and the most that there is
    above what was before. stands, least: the same if all blocks are away that may be. saved, used: the bytes of the
    blocks that it saves, and of those that it uses for the first time.
    """

    seconds: float
    change: int
    high: int
    stands: int
    least: int
    saved: int
    used: int


def _moments(step: RecordedStep, plain: RecordedStep, place: Sequence[int], count: int) -> list[_Stretch]:
    profile = step.profile
    seconds = [0.0] * count
    change, high, stands, least = ([0] * count for _ in range(4))
    saved, used = [0] * (count + 1), [0] * (count + 1)
    level = step.levels
    standing = [*step.standing, step.standing[-1] if step.standing else 0]
    in_use = least_bytes(profile)
    for part, k in enumerate(place):
        a, z = step.cuts[part], step.cuts[part + 1]
        seconds[k] += max(step.seconds[part], plain.seconds[part])
        high[k] = max(high[k], change[k] + max(profile.full[a:z], default=level[a]) - level[a])
        change[k] += level[z] - level[a]
        least[k] = max(least[k], stands[k] + max(in_use[a:z], default=standing[a]) - standing[a])
        stands[k] += standing[z] - standing[a]
    for n, s, u in zip(profile.nbytes, profile.saved, profile.used, strict=True):
        saved[place[step.part_of(s)]] += n
        used[place[step.part_of(u)] if u < len(step.names) else count] += n
    return list(map(_Stretch, seconds, change, high, stands, least, saved, used))

"""Chooses for each layer of a step whether it keeps all, or is computed again and how."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, pairwise, permutations, product, repeat
from math import inf
from typing import NamedTuple

from ..actions import How
from .disk_and_states import StatesShare
from .planner import plan
from .profile import BudgetTooSmall, Link, least_bytes, least_time
from .stitching import Choice, RecordedStep, Way, Ways

_HOWS: tuple[How, How] = ("full", "cheap")
# Layers are looked at in so many groups at most, of layers that follow each other.
_GROUPS = 32
# It begins to search from each number of groups in each way, by this part of all of them.
_COUNTS = 12
# So many moments of a step are looked at by the fine estimate.
_MOMENTS = 64
# So many blocks are planned for, in all attempts together.
_EFFORT = 12_000
# Attempts of each plan that is compared.
_ATTEMPTS = 3
# So many times the time of copying them count bytes for which there is no room, whatever leaves.
_IMPOSSIBLE = 1000
# An estimate has a link that is never idle while there is something to copy. Where a plan takes longer than its
# estimate by this share, the search goes on with estimates for slower links, until one is as long as its plan.
_TRUE = 0.01
_SLOWER = (0.8, 0.65, 0.5, 0.4, 0.3)
# Of a step's time: what differs by less is the same. Then the one counts that computes less again.
_SAME = 1e-4
# What is better by this share is followed before the others near it have plans.
_MUCH = 0.01


@dataclass(frozen=True)
class Chosen:
    """How the layers are treated, the bytes of optimizer states that stay on the device, and the seconds then.

    before: the seconds with the treatment that there was.
    """

    choice: Choice
    kept: int
    seconds: float
    before: float


def choose(
    ways: Ways,
    budget: int,
    link: Link,
    states: StatesShare,
    layers: Sequence[int],
    now: Choice,
    *,
    most: int | None = None,
) -> Chosen:
    """The treatment of the layers with which the step is the shortest, with the plan that it then has.

    Blocks that are kept may still leave, in copies that hide behind compute, as far as they do. Layers that are
    computed again take the time of that, and leave less to move. What is left of the budget optimizer states may
    have, which else cross the link while nothing hides it.

    It searches by estimates that take an instant, over groups of layers, and then by plans, near to what is best by
    a coarse and by a fine estimate: where memory is short, either may miss what the other finds. Where plans take
    longer than their estimates, as where several microbatches are under way, it searches behind slower links too.
    layers: the numbers of those that may be treated. now: how they are treated before that.
    most: the bytes that there are where more than the budget is needed whatever leaves; None is no more.
    Where each choice needs more room below than there is, it is the one that lacks the least. Raises BudgetTooSmall
    where no choice keeps the budget else.
    """
    return _Search(ways, budget, link, states, layers, budget if most is None else most).best(now)


class _Point(NamedTuple):
    """The way of each group of layers, and the bytes of states that are kept."""

    ways: tuple[Way, ...]
    kept: int


_Cost = Callable[[_Point], float]


class _Search:
    def __init__(
        self, ways: Ways, budget: int, link: Link, states: StatesShare, layers: Sequence[int], most: int
    ) -> None:
        self._ways = ways
        self._budget = budget
        self._most = most
        self._link = link
        self._states = states
        size = -(-len(layers) // _GROUPS)
        self._groups = [layers[k : k + size] for k in range(0, len(layers), size)] if layers else []
        # Of each group, how all of its layers can be treated.
        self._allowed = [set.intersection(*map(ways.of, group)) for group in self._groups]
        self._room = max(0, min(states.total, budget - states.rounding - states.step_peak))
        group = {layer: n for n, layers in enumerate(self._groups) for layer in layers}
        blocks = 1 + len(ways.steps[None].blocks)
        # Of very many blocks there is time for one plan, and for one attempt of it.
        self._plans = _EFFORT // (_ATTEMPTS * blocks)
        self._attempts = max(1, min(_ATTEMPTS, _EFFORT // (4 * blocks)))
        coarse = Outline(ways, link, states, group)
        self._outlines = [coarse]
        if self._plans and (fine := _MOMENTS // coarse.moments) > 1:
            self._outlines.append(Outline(ways, link, states, group, fine))
        self._exact: dict[_Point, float] = {}
        self._failed: BudgetTooSmall | None = None

    def best(self, now: Choice) -> Chosen:
        there = tuple([now.get(group[0]) for group in self._groups])
        points = [_Point(there, kept) for kept in (0, self._room)]
        seeds = [*points, *self._seeds()]
        guesses = [partial(self._guess, outline) for outline in self._outlines]
        sizes = _halves(len(self._groups))
        begun = [self._descend(min(seeds, key=guess), guess, sizes) for guess in guesses]
        before = min(points, key=guesses[0])
        if self._plans:
            begun[0] = min(begun[0], before, key=self._planned)
            polished = [self._polish(*each, self._plans) for each in zip(begun, guesses, strict=True)]
            found = min(polished, key=self._planned)
        else:
            found = min(begun[0], before, key=guesses[0])
            found = before if self._planned(found) == inf else found
        if self._planned(found) > guesses[-1](found) * (1 + _TRUE):
            found = min([found, *self._behind_slower_links(seeds, sizes)], key=self._planned)
        if self._failed is not None and self._planned(found) == inf:
            try:
                raise self._failed
            finally:
                self._failed = None
        seconds = self._planned(found)
        was = self._planned(before) if self._plans else seconds * guesses[0](before) / guesses[0](found)
        return Chosen(self._choice(found), found.kept, seconds, was)

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

    def _behind_slower_links(self, seeds: Sequence[_Point], sizes: Sequence[int]) -> Iterator[_Point]:
        """The best points by estimates for a slower and slower link. The last is one whose plan is as long."""
        for share in _SLOWER:
            guess = partial(self._guess, self._outlines[-1].slower(share))
            point = self._descend(min(seeds, key=guess), guess, sizes)
            yield point
            if self._planned(point) <= guess(point) * (1 + _TRUE):
                return

    def _descend(self, point: _Point, guess: _Cost, sizes: Sequence[int]) -> _Point:
        """Goes from a point to better ones near it, in steps of these sizes."""
        for size in sizes:
            while (better := self._better(point, guess, self._near(point, size))) is not None:
                point = better
        return point

    def _polish(self, point: _Point, guess: _Cost, most: int) -> _Point:
        """The same by plans, of which it makes so many at most, for what is guessed to be the best."""
        while True:
            near = sorted(dict.fromkeys(self._near(point, 1)), key=guess)[:most]
            much = self._better(point, self._planned, near, _MUCH)
            best = min(near, key=self._planned, default=point) if much is None else much
            if self._planned(best) >= self._planned(point) * (1 - _SAME):
                return point
            point, most = best, most - (len(near) if much is None else near.index(much) + 1)

    def _better(self, point: _Point, cost: _Cost, others: Iterable[_Point], by: float = _SAME) -> _Point | None:
        """The first of the others that costs less, by this share."""
        most = cost(point) * (1 - by)
        return next((other for other in others if cost(other) < most), None)

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

    def _guess(self, outline: Outline, point: _Point) -> float:
        return outline.seconds(point.ways, self._budget, point.kept, self._most)

    def _planned(self, point: _Point) -> float:
        if point not in self._exact:
            profile = self._ways.stitched(self._choice(point)).profile
            budget = self._budget - point.kept
            try:
                beside = self._states.beside(self._link, profile, self._budget, point.kept)
                eased = profile.eased(budget, self._most - point.kept)
                made = plan(eased, budget, beside.link, attempts=self._attempts)
                self._exact[point] = made.seconds + beside.seconds
            except BudgetTooSmall as error:
                self._failed = error.with_traceback(None)  # whose frames have all that is under way, and this
                cost = _IMPOSSIBLE * self._ways.steps[None].profile.compute * error.floor / error.budget
                self._exact[point] = cost if error.without_room else inf
        return self._exact[point]

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
    """A step by groups of layers, for an estimate of its time that takes an instant.

    It is `least_seconds` with few moments, whose number is `moments`: of each layer's forward and backward, or of
    those of a group of layers in a row, so many.

    states: what crosses the link beside activations. group: of each layer that may be treated.
    """

    def __init__(
        self, ways: Ways, link: Link, states: StatesShare, group: Mapping[int, int], fine: int = 1
    ) -> None:
        self._link = link
        self._states = states
        self._group: list[int | None] = []  # of each moment
        parts: list[list[int]] = []  # of each layer, or group of layers, in each direction
        before: tuple[object, ...] | None = None
        for part, of in enumerate(ways.layers):
            known = None if of is None else group.get(of[2])
            key = (part,) if of is None or known is None else (*of[:2], known)
            if key != before:
                self._group.append(known)
                parts.append([])
                before = key
            parts[-1].append(part)
        self._group = [n for n in self._group for _ in range(fine)]
        self.moments = len(self._group)
        self._stretches = {way: _stretches(step, ways.steps[None], parts, fine) for way, step in ways.steps.items()}
        self._plain = ways.steps[None].profile.compute
        self._begin = ways.steps[None].standing[0]
        kinds = [of and of[0] for of in (ways.layers[row[0]] for row in parts) for _ in range(fine)]
        self._backward = kinds.index("backward") if "backward" in kinds else len(kinds)

    def slower(self, share: float) -> Outline:
        """The same behind a link with this share of the rates."""
        other = copy(self)
        other._link = replace(self._link, out=self._link.out * share, back=self._link.back * share)
        return other

    def seconds(self, ways: Sequence[Way], budget: int, kept: int, most: int = 0) -> float:
        """The least time of the step within a budget, with each group treated so; more where it cannot keep it.

        kept: of the budget, the bytes of optimizer states. most: as `choose` has it.
        """
        budget, most = budget - kept, most - kept
        moments = [self._stretches[None if n is None else ways[n]][k] for k, n in enumerate(self._group)]
        later = sum([moment.used for moment in moments])
        level = standing = self._begin
        lacking = 0
        stretches = []
        for seconds, change, high, stands, least, saved, used in moments:
            room = max(budget, min(standing + least, most))
            stretches.append((seconds, level + high - room, saved, used))
            lacking = max(lacking, standing + least - room)
            level += change
            standing += stands
        forward = sum([moment.seconds for moment in moments[: self._backward]])
        backward = sum([moment.seconds for moment in moments[self._backward :]])
        away = max([stretch[1] for stretch in stretches], default=0)
        link, late, after = self._states.left(self._link, forward, backward, away, kept)
        below = 0 if link.room is None else away - link.room  # what finds no room
        impossible = lacking / link.out + (self._plain * (1 + below / max(1, budget)) if below > 0 else 0.0)
        return least_time(stretches, later, link) + late + after + _IMPOSSIBLE * impossible


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


def _stretches(
    step: RecordedStep, plain: RecordedStep, parts: Sequence[Sequence[int]], fine: int
) -> list[_Stretch]:
    """Each of some parts in a row, in so many stretches of about the same time."""
    profile = step.profile
    level = step.levels
    standing = [*step.standing, step.standing[-1] if step.standing else 0]
    in_use = least_bytes(profile)
    saved, used = Counter[int](), Counter[int]()  # bytes by position
    for n, s, u in zip(profile.nbytes, profile.saved, profile.used, strict=True):
        saved[s] += n
        used[u] += n
    found = []
    for row in parts:
        seconds = sum(max(step.seconds[part], plain.seconds[part]) for part in row) / fine
        for a, z in pairwise(_pieces(profile.seconds, step.cuts[row[0]], step.cuts[row[-1] + 1], fine)):
            high = max(profile.full[a:z], default=level[a]) - level[a]
            least = max(in_use[a:z], default=standing[a]) - standing[a]
            change, stands = level[z] - level[a], standing[z] - standing[a]
            moved = (sum(map(by.__getitem__, range(a, z))) for by in (saved, used))
            found.append(_Stretch(seconds, change, max(0, high), stands, max(0, least), *moved))
    return found


def _pieces(seconds: Sequence[float], begin: int, end: int, count: int) -> list[int]:
    """Where each of so many pieces of these positions begins, by their time, and the end."""
    until = list(accumulate(seconds[begin:end]))
    whole = until[-1] if until else 0.0
    return [begin, *(begin + bisect_left(until, whole * k / count) for k in range(1, count)), end]

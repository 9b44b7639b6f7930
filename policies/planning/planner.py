"""Finds the plan for a step: which blocks leave, when each is released, and when it is back."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush, heapreplace
from itertools import accumulate, chain, islice, product
from math import inf

from .copies import Prediction, copied_from, early_reloads, latest_reloads, predict
from .profile import (
    BudgetTooSmall,
    Cause,
    Link,
    Moments,
    Plan,
    PlannedStall,
    Profile,
    least_seconds,
)

# How many times slower a link may be on which all reloads are in time: the more, the more room is kept for them.
_LEADS = (1.5, 3.0, 6.0, 0.5, 1.0, 0.0, 12.0, 0.25)
# Where there is little room for what leaves. More of it leaves so that reloads may be early.
_LEADS_LITTLE_ROOM = (1.5, 0.0, 3.0, 6.0, 0.5, 1.0, 12.0, 0.25)
# With this one, what lives the longest is tried too.
_LIVES = 6.0
# Where backward comes back to blocks, reloads crowd: more room for them is tried first.
_LEADS_AGAIN = (12.0, 6.0, 1.5, 3.0, 0.5)
# Drafts for one plan, at most; at least, where backward comes back to blocks; and with other leads, at least.
_MOST = 100
_FEWEST_AGAIN = 6
_TRIALS = 5
# Of the blocks that are waited for, this share is exchanged at first.
_EXCHANGED = 1 / 8
_TOLERANCE = 0.005
# How often the ends of copies are worked out anew from what leaves.
_PASSES = 2
# So many blocks are planned for, in all attempts together: about 50 ms on one core.
_EFFORT = 4000


def plan(profile: Profile, budget: int, link: Link, *, attempts: int | None = None) -> Plan:
    """The best of a few plans for the step that keep `budget` bytes of device memory.

    attempts: how many are made at most; it ends at the first that is within 0.5 % of a bound. None is as many as
        take about 50 ms, and at least three.

    Raises BudgetTooSmall.
    """
    return Planner(profile, budget, link).plan(attempts)


def least_memory(profile: Profile, budget: int, link: Link, slowdown: float) -> Plan:
    """A plan with as little memory as a slowdown allows, and at most the budget. Raises BudgetTooSmall.

    slowdown: the share of the step's compute time by which it may be longer. Where the budget itself is slower, it
    is planned for.
    """
    best = plan(profile, budget, link)
    allowed = profile.compute * (1 + slowdown)
    low, high = 0, best.peak
    for _ in range(8):
        middle = (low + high) // 2
        try:
            made = plan(profile, middle, link)
        except BudgetTooSmall as error:
            low = max(middle, error.floor - 1)
            continue
        if made.seconds <= allowed:
            best, high = made, made.peak
        else:
            low = middle
    return best


@dataclass(frozen=True)
class _Recipe:
    """A way to make drafts. lead: of how much slower a link reloads are in time. early: as of `copied_from`."""

    lead: float
    selector: Selector
    early: bool


@dataclass(frozen=True)
class _Draft:
    """A plan, by moments. over: bytes by which it passes the budget, or the room for what leaves.

    begins: of its copies, as of `copied_from`.
    """

    over: int
    release: dict[int, int]
    reload: dict[int, int]
    begins: dict[int, int]
    prediction: Prediction
    recipe: _Recipe
    stays: frozenset[int]

    def cost(self) -> tuple[int, float]:
        return self.over, self.prediction.seconds


class Planner:
    """Makes plans for one step, one budget and one link. Raises BudgetTooSmall."""

    def __init__(self, profile: Profile, budget: int, link: Link) -> None:
        moments = profile.moments
        _check_budget(moments, budget, link)
        self._profile = profile
        self._moments = moments
        self._budget = budget
        self._link = link
        self._again = any(earlier >= 0 for earlier in moments.earlier)
        self._by_use = Selector(moments, budget, profile.backward, profile.backward)
        self._copying = [n / link.out + link.latency for n in moments.nbytes]
        self._saved_at = [moments.clock[g] for g in moments.saved]
        self._bound = least_seconds(moments, budget, link)
        self._goal = self._bound * (1 + _TOLERANCE)

    def plan(self, attempts: int | None = None) -> Plan:
        blocks = len(self._moments.nbytes)
        fewest = _FEWEST_AGAIN if self._again else 1
        left = max(fewest, min(_MOST, _EFFORT // (blocks + 1))) if attempts is None else attempts
        drafts: list[_Draft] = []
        for recipe in islice(self._recipes(), min(left, max(_TRIALS, left * 2 // 3))):
            drafts.append(self._attempt(recipe, hopeful=not drafts))
            if self._good(drafts[-1]):
                break
        drafts.sort(key=_Draft.cost)
        best = drafts[0]
        exchanges = chain.from_iterable(map(self._exchanges, drafts))
        for _ in range(left - len(drafts)):
            draft = None if self._good(best) else next(exchanges, None)
            if draft is None:
                break
            best = min(best, draft, key=_Draft.cost)
        if best.over and self._link.room is not None:
            full = self._moments.full
            worst, least = full.index(max(full)), self._budget + best.over
            raise _too_small(self._moments, self._budget, worst, least, best.over)
        return self._finished(best)

    def _recipes(self) -> Iterator[_Recipe]:
        if self._again:
            for early, lead in product((True, False), _LEADS_AGAIN):
                for selector in (self._by_use, self._unused_first, self._by_life):
                    yield _Recipe(lead, selector, early)
            return
        for lead in _LEADS if self._link.room is None else _LEADS_LITTLE_ROOM:
            yield _Recipe(lead, self._by_use, early=False)
            if lead == _LIVES and self._by_life.ranked != self._by_use.ranked:
                yield _Recipe(lead, self._by_life, early=False)

    @cached_property
    def _unused_first(self) -> Selector:
        """Lets go of what nobody uses any more, which does not come back, and only then of what is used last."""
        profile = self._profile
        lives = zip(profile.backward, self._moments.returns, strict=True)
        worth = [layer if returns else inf for layer, returns in lives]
        return Selector(self._moments, self._budget, profile.backward, worth)

    @cached_property
    def _by_life(self) -> Selector:
        """Lets go of what lives the longest, rather than of what is used last.

        While several microbatches are under way, what is used last was saved last, and the link was idle before.
        """
        profile = self._profile
        layers, clock = profile.backward, profile.clock
        saved: dict[int, float] = {}
        for position, layer in zip(profile.saved, layers, strict=True):
            saved.setdefault(layer, clock[position])
        return Selector(self._moments, self._budget, layers, [clock[layer] - saved[layer] for layer in layers])

    def _exchanges(self, draft: _Draft) -> Iterator[_Draft]:
        """Drafts in which what is waited for the longest stays on the device, and others leave in its place.

        The next goes on from the fastest so far. It begins with many blocks at once; where that does not help, with
        half as many.
        """
        tried: set[int] = set()
        count = 0
        while True:
            waits: defaultdict[int, float] = defaultdict(float)
            for wait in draft.prediction.waits:
                if wait.block not in tried:
                    waits[wait.block] += wait.seconds
            if not waits:
                return
            longest = sorted(waits, key=waits.__getitem__, reverse=True)
            count = count or max(1, int(_EXCHANGED * len(longest)))
            if count == 1:
                tried.add(longest[0])
            changed = self._attempt(draft.recipe, draft.stays.union(longest[:count]))
            yield changed
            if changed.cost() < draft.cost():
                draft = changed
            else:
                count = max(1, count // 2)

    def _good(self, draft: _Draft) -> bool:
        return not draft.over and draft.prediction.seconds <= self._goal

    def _attempt(self, recipe: _Recipe, stays: frozenset[int] = frozenset(), *, hopeful: bool = False) -> _Draft:
        """hopeful: the ends of the copies may not matter, as where each finds its link free."""
        moments, selector = self._moments, recipe.selector
        slack = self._goal - moments.end
        back = moments.used
        begins = copied_from(range(len(back)), (), moments.earlier, early=recipe.early)
        ready = [self._saved_at[begins[b]] + seconds for b, seconds in enumerate(self._copying)]
        selection = selector.select(ready, back, stays)
        for _ in range(_PASSES):
            release = selection.release
            ready = self._copies_end(release, recipe.early)
            if hopeful and all(ready[b] <= moments.clock[g] + slack for b, g in release.items()):
                draft = self._timed(selection, recipe, stays, rounds=1)
                if self._good(draft):
                    return draft
            back = latest_reloads(moments, release, self._link, recipe.lead)
            selection = selector.select(ready, back, stays)
        return self._timed(selection, recipe, stays)

    def _timed(
        self, selection: Selection, recipe: _Recipe, stays: frozenset[int], rounds: int = 2 + _PASSES
    ) -> _Draft:
        """The draft that releases these blocks at the latest then; earlier, where that is faster."""
        moments = self._moments
        release = selection.release
        begins = copied_from(sorted(release), release, moments.earlier, early=recipe.early)
        best: _Draft | None = None
        over = selection.over
        if (room := self._link.room) is not None:
            over = max(over, self._below(release, begins) - room)
        for more in reversed(range(rounds)):
            reload = early_reloads(moments, self._budget, release, selection.back)
            prediction = predict(moments, release, reload, self._link, begins)
            draft = _Draft(over, release, reload, begins, prediction, recipe, stays)
            if best is not None and draft.cost() >= best.cost():
                break
            best = draft
            if not more or self._good(draft):
                break
            # Released as soon as its copy has ended, a block makes room for reloads.
            times, copied = prediction.arrivals(moments), prediction.copied
            release = {
                b: min(g, max(moments.loose[b], bisect_left(times, copied[b])))
                for b, g in selection.release.items()
            }
        return best if best is not None else draft

    def _below(self, release: Collection[int], begins: Mapping[int, int]) -> int:
        """The most bytes that are away at once if these leave, each from its copy out to its use."""
        profile = self._profile
        change = [0] * (len(profile.seconds) + 1)
        for b in release:
            change[profile.saved[begins.get(b, b)]] += profile.nbytes[b]
            change[profile.used[b]] -= profile.nbytes[b]
        return max(accumulate(change))

    def _copies_end(self, release: Collection[int], early: bool) -> list[float]:
        """When the copy out of each block would end, behind those of the blocks that leave."""
        ends = list(self._saved_at)  # where there is a copy from before
        begins = copied_from(range(len(ends)), release, self._moments.earlier, early=early)
        free = 0.0
        for b in sorted(begins, key=begins.__getitem__) if early else begins:
            begin = self._saved_at[begins[b]]
            ends[b] = (begin if begin > free else free) + self._copying[b]
            if b in release:
                free = ends[b]
        return ends

    def _finished(self, draft: _Draft) -> Plan:
        moments, profile = self._moments, self._profile
        change = [0] * (len(moments) + 1)
        for b, g in draft.release.items():
            change[g] -= moments.nbytes[b]
            change[draft.reload[b]] += moments.nbytes[b]
        memory = map(int.__add__, moments.full, accumulate(change))
        action = [*moments.action, len(profile.seconds)]
        release = {b: action[g] for b, g in draft.release.items()}
        return Plan(
            release=release,
            reload={b: min(action[g], profile.used[b]) for b, g in draft.reload.items()},
            peak=max(memory, default=0),
            budget=self._budget,
            seconds=draft.prediction.seconds,
            stalls=tuple(
                PlannedStall(release[wait.block], wait.block, Cause.RELEASE, wait.seconds)
                if wait.release
                else PlannedStall(profile.used[wait.block], wait.block, Cause.RELOAD, wait.seconds)
                for wait in draft.prediction.waits
            ),
            bound=min(self._bound, draft.prediction.seconds),  # they are not summed alike
            early={b: profile.saved[first] for b, first in draft.begins.items() if first != b},
            below=self._below(draft.release, draft.begins),
        )


def _check_budget(moments: Moments, budget: int, link: Link) -> None:
    """Raises BudgetTooSmall where no plan can keep the budget, as of `floor`, and of the room that the link has."""
    least = movable = moments.least
    if (room := link.room) is not None:
        least = [max(low, full - room) for low, full in zip(movable, moments.full, strict=True)]
    if (most := max(least, default=0)) > budget:
        worst = least.index(most)
        raise _too_small(moments, budget, worst, most, most - movable[worst])


def _too_small(moments: Moments, budget: int, worst: int, least: int, without_room: int) -> BudgetTooSmall:
    """The error for a moment that needs so many bytes at least. without_room: of these, as the error has it."""
    lives = zip(moments.nbytes, moments.saved, moments.dropped, strict=True)
    unmovable = moments.full[worst] - sum(n for n, s, d in lives if s <= worst < d)
    return BudgetTooSmall(budget, least, moments.action[worst], unmovable, without_room=without_room)


@dataclass(frozen=True)
class Selection:
    """release: the moment of each block that leaves. back: the moment of each block by which it has room again.

    over: bytes by which the budget is passed all the same.
    """

    release: dict[int, int]
    back: list[int]
    over: int


class Selector:
    """Goes through a step and lets blocks go where memory would pass the budget.

    moments: the step. layers: of each block the position at which its layer's backward begins. worth: of each
    block, and the same for those of a layer; of two that could leave, the one does that is worth more, and of two
    that are worth the same, the one that is used later.
    """

    def __init__(self, moments: Moments, budget: int, layers: Sequence[int], worth: Sequence[float]) -> None:
        self._moments = moments
        self._excess = [full - budget for full in moments.full]
        nbytes = moments.nbytes
        # Of one layer the largest first, which is the fewest copies.
        self.ranked = sorted(range(len(nbytes)), key=nbytes.__getitem__, reverse=True)
        self.ranked.sort(key=layers.__getitem__, reverse=True)
        self.ranked.sort(key=worth.__getitem__, reverse=True)
        self._rank = [0] * len(nbytes)
        for rank, b in enumerate(self.ranked):
            self._rank[b] = rank
        self._layers = layers
        self._by_loose = sorted(range(len(nbytes)), key=moments.loose.__getitem__)

    @cached_property
    def _lower(self) -> list[int]:
        return _next_lower(self._moments.full)

    def select(self, ready: Sequence[float], back: Sequence[int], stays: Collection[int] = ()) -> Selection:
        """The blocks that leave.

        ready: when each block's copy out would end, in seconds; back: the moment from which it shall take memory
        again, that of its use or one before; stays: blocks that do not leave.

        Of the blocks whose copy has ended, that one goes which is worth most. Where there is none, the device waits
        for the copy that ends first. Where there is none of these either, what shall be back comes later.
        """
        moments, rank, ranked, layers = self._moments, self._rank, self.ranked, self._layers
        clock, nbytes, loose, used = moments.clock, moments.nbytes, moments.loose, moments.used
        by_loose = self._by_loose
        back = list(back)
        due = [0] * (len(moments) + 1)  # bytes that come back, by moment
        young: list[tuple[float, int]] = []  # blocks by the end of their copy
        ripe: list[int] = []  # ranks of the blocks whose copy has ended
        # Of blocks that shall be back before their use, and of those that are or stay until then, last used first:
        # as one number, whose rest is the block.
        coming: list[int] = []
        there: list[int] = []
        count = len(nbytes)
        release: dict[int, int] = {}
        known = away = over = 0
        for g, beyond in enumerate(self._excess):
            away -= due[g]
            excess = beyond - away
            if excess <= 0:
                continue
            while known < len(by_loose) and loose[by_loose[known]] <= g:
                b = by_loose[known]
                if b not in stays:
                    heappush(young, (ready[b], b))
                known += 1
            now = clock[g]
            while young and young[0][0] <= now:
                heappush(ripe, rank[heappop(young)[1]])
            while excess > 0:
                if ripe:
                    b = ranked[heappop(ripe)]
                    if ripe and nbytes[smaller := ranked[ripe[0]]] >= excess and layers[smaller] == layers[b]:
                        heapreplace(ripe, rank[b])  # a block of the same layer that is smaller does as well
                        b = smaller
                elif young:
                    _, b = heappop(young)
                else:
                    while coming and coming[0] < (g + 1) * count:
                        b = heappop(coming) % count
                        heappush(there, b - used[b] * count)
                    if not there or used[there[0] % count] <= g:
                        break
                    b = heappop(there) % count
                    back[b] = min(self._lower[g], used[b])
                if back[b] <= g:
                    heappush(there, b - used[b] * count)
                    continue
                release.setdefault(b, g)
                if back[b] < used[b]:
                    heappush(coming, back[b] * count + b)
                due[back[b]] += nbytes[b]
                away += nbytes[b]
                excess -= nbytes[b]
            if excess > over:
                over = excess
        return Selection(release, back, over)


def _next_lower(values: Sequence[int]) -> list[int]:
    """Of each place, the first after it with a lower value, or the end."""
    lower = [len(values)] * len(values)
    higher: list[int] = []
    for place, value in enumerate(values):
        while higher and values[higher[-1]] > value:
            lower[higher.pop()] = place
        higher.append(place)
    return lower

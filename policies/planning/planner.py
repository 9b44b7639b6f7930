"""Makes plans: what leaves, when its memory is given up, and when it comes back."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, islice

from .bound import BudgetTooSmall, floor, least_seconds
from .link import Link
from .plan import Cause, Plan, PlannedStall
from .prediction import Prediction, predict
from .profile import Profile
from .reloads import early_reloads, latest_reloads
from .selection import Selection, Selector

# How many times slower a link may be on which all reloads are in time: the more, the more room is kept for them.
_LEADS = (1.5, 3.0, 6.0, 0.5, 1.0, 0.0, 12.0, 0.25)
# With this one, what lives the longest is tried too.
_LIVES = 6.0
# Drafts for one plan, at most; and of these, with other leads, at least.
_MOST = 100
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


@dataclass(frozen=True)
class _Draft:
    """A plan, by moments. over: bytes by which it passes the budget."""

    over: int
    release: dict[int, int]
    reload: dict[int, int]
    prediction: Prediction
    lead: float
    selector: Selector
    stays: frozenset[int]

    def cost(self) -> tuple[int, float]:
        return self.over, self.prediction.seconds


class Planner:
    """Makes plans for one step, one budget and one link. Raises BudgetTooSmall."""

    def __init__(self, profile: Profile, budget: int, link: Link) -> None:
        moments = profile.moments
        least, worst, unmovable = floor(moments)
        if budget < least:
            raise BudgetTooSmall(budget, least, moments.action[worst], unmovable)
        self._profile = profile
        self._moments = moments
        self._budget = budget
        self._link = link
        self._by_use = Selector(moments, budget, profile.backward, profile.backward)
        self._copying = [n / link.out + link.latency for n in moments.nbytes]
        self._saved_at = [moments.clock[g] for g in moments.saved]
        self._bound = least_seconds(moments, budget, link)
        self._goal = self._bound * (1 + _TOLERANCE)

    def plan(self, attempts: int | None = None) -> Plan:
        blocks = len(self._moments.nbytes)
        left = max(1, min(_MOST, _EFFORT // (blocks + 1))) if attempts is None else attempts
        drafts: list[_Draft] = []
        for lead, selector in islice(self._trials(), min(left, max(_TRIALS, left * 2 // 3))):
            drafts.append(self._attempt(lead, selector, hopeful=not drafts))
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
        return self._finished(best)

    def _trials(self) -> Iterator[tuple[float, Selector]]:
        for lead in _LEADS:
            yield lead, self._by_use
            if lead == _LIVES and self._by_life.ranked != self._by_use.ranked:
                yield lead, self._by_life

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
            changed = self._attempt(draft.lead, draft.selector, draft.stays.union(longest[:count]))
            yield changed
            if changed.cost() < draft.cost():
                draft = changed
            else:
                count = max(1, count // 2)

    def _good(self, draft: _Draft) -> bool:
        return not draft.over and draft.prediction.seconds <= self._goal

    def _attempt(
        self, lead: float, selector: Selector, stays: frozenset[int] = frozenset(), *, hopeful: bool = False
    ) -> _Draft:
        """A draft with room for reloads on a link `lead` times slower.

        hopeful: the ends of the copies may not matter, as where each finds its link free.
        """
        moments = self._moments
        slack = self._goal - moments.end
        back = moments.used
        ready = list(map(float.__add__, self._saved_at, self._copying))
        selection = selector.select(ready, back, stays)
        for _ in range(_PASSES):
            release = selection.release
            ready = self._copies_end(release)
            if hopeful and all(ready[b] <= moments.clock[g] + slack for b, g in release.items()):
                draft = self._timed(selection, lead, selector, stays, rounds=1)
                if self._good(draft):
                    return draft
            back = latest_reloads(moments, release, self._link, lead)
            selection = selector.select(ready, back, stays)
        return self._timed(selection, lead, selector, stays)

    def _timed(
        self,
        selection: Selection,
        lead: float,
        selector: Selector,
        stays: frozenset[int],
        rounds: int = 2 + _PASSES,
    ) -> _Draft:
        """The draft that releases these blocks at the latest then; earlier, where that is faster."""
        moments = self._moments
        release = selection.release
        best: _Draft | None = None
        for more in reversed(range(rounds)):
            reload = early_reloads(moments, self._budget, release, selection.back)
            prediction = predict(moments, release, reload, self._link)
            draft = _Draft(selection.over, release, reload, prediction, lead, selector, stays)
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

    def _copies_end(self, release: Collection[int]) -> list[float]:
        """When the copy out of each block would end, behind those of the blocks that leave."""
        ends: list[float] = []
        free = 0.0
        for b, (saved, seconds) in enumerate(zip(self._saved_at, self._copying, strict=True)):
            end = (saved if saved > free else free) + seconds
            ends.append(end)
            if b in release:
                free = end
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
        )

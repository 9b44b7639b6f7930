"""When copies run: the latest and the earliest reloads of a plan, and the waits that follow."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from .profile import Link, Moments

_SAVE, _RELEASE, _RELOAD, _USE = range(4)
_OUT, _BACK = range(2)
_NOTHING = 1e-9  # seconds: less than that is an error of rounding


@dataclass(frozen=True)
class PredictedWait:
    """The compute stream waits at a moment for a block's copy out (`release`), or for its copy back."""

    moment: int
    block: int
    release: bool
    seconds: float


@dataclass(frozen=True)
class Prediction:
    """seconds: the step. waits: in their order. copied: of each block that leaves, when its copy out ends."""

    seconds: float
    waits: list[PredictedWait]
    copied: dict[int, float]

    def arrivals(self, moments: Moments) -> list[float]:
        """When each moment comes, before what is waited for at it."""
        times = list(moments.clock)
        late, done = 0.0, 0
        for wait in self.waits:
            if late:
                times[done : wait.moment + 1] = [at + late for at in times[done : wait.moment + 1]]
            late += wait.seconds
            done = wait.moment + 1
        times[done:] = [at + late for at in times[done:]]
        return times


def copied_from(
    blocks: Iterable[int], leaving: Collection[int], earlier: Sequence[int], *, early: bool
) -> dict[int, int]:
    """Of each of the blocks that has to be copied to the host if it leaves, the one with whose save that begins.

    leaving: those that leave. earlier: as a `Profile` has it. early: what a block has been before, since it last
    left, may be copied too: it is used while the copy goes on, and leaves afterwards. Else it is the block itself.
    """
    found = {}
    for b in blocks:
        if not earlier or earlier[b] not in leaving:
            found[b] = b
            while early and earlier[found[b]] >= 0 and earlier[found[b]] not in leaving:
                found[b] = earlier[found[b]]
    return found


def predict(
    moments: Moments,
    release: Mapping[int, int],
    reload: Mapping[int, int],
    link: Link,
    begins: Mapping[int, int] | None = None,
) -> Prediction:
    """Runs a plan on the compute stream and two queues of copies.

    begins: as `copied_from` has it of the blocks that leave; None where no copy begins before its block's save.

    A copy begins when it is issued and those before it in its direction have ended. What has a copy on the host
    from an earlier time takes none.
    """
    clock, nbytes, saved, used = moments.clock, moments.nbytes, moments.saved, moments.used
    returns, by_use, rank = moments.returns, moments.by_use, moments.use_rank
    # What happens, in order: the moment, what it is, and the block in the order of its kind, as one number.
    width = len(nbytes).bit_length()
    mask = (1 << width) - 1
    step = width + 2
    save, released, back, use = (kind << width for kind in (_SAVE, _RELEASE, _RELOAD, _USE))
    if begins is None:
        begins = copied_from(sorted(release), release, moments.earlier, early=False)
    events = [saved[first] << step | save | b for b, first in begins.items()]
    events += [g << step | released | b for b, g in release.items()]
    events += [g << step | back | rank[b] for b, g in reload.items() if returns[b]]
    events += [used[b] << step | use | rank[b] for b in reload if returns[b]]
    events.sort()
    out_rate, back_rate, latency = link.out, link.back, link.latency
    copies = _Copies(link.both)
    late = 0.0
    outs, backs = dict.fromkeys(release.keys() - begins.keys(), 0.0), [0.0] * len(nbytes)
    waits: list[PredictedWait] = []
    for event in events:
        g = event >> step
        copies.go_on(clock[g] + late)
        kind = event >> width & 3
        x = event & mask
        if kind == _SAVE:
            outs[x] = copies.begin(_OUT, x, nbytes[x] / out_rate + latency)
        elif kind == _RELOAD:
            backs[x] = copies.begin(_BACK, x, nbytes[by_use[x]] / back_rate + latency)
        elif kind == _RELEASE:
            if seconds := copies.until_end(_OUT, outs[x]):
                waits.append(PredictedWait(g, x, True, seconds))
                late += seconds
        elif seconds := copies.until_end(_BACK, backs[x]):
            waits.append(PredictedWait(g, by_use[x], False, seconds))
            late += seconds
    copies.go_on(inf)
    return Prediction(moments.end + late, waits, {b: copies.out_ended.get(b, 0.0) for b in release})


class _Copies:
    """Copies out and back, one after another in each direction, slower by a share while both directions are busy.

    Work is in the seconds that it takes while the other direction is idle. A copy is known by all the work of its
    direction that is done when it has ended.

    out_ended: of each copy out that has ended, when that was.
    """

    def __init__(self, both: float) -> None:
        self._both = both
        self._now = 0.0
        self._left, self._all = [0.0, 0.0], [0.0, 0.0]  # in each direction, what is still to do, and all that was
        self._outs: deque[tuple[float, int]] = deque()
        self.out_ended: dict[int, float] = {}

    def go_on(self, now: float) -> None:
        """It is so late now, in seconds."""
        out, back = self._left
        if out and back and now > self._now:
            self._work(min(now - self._now, min(out, back) / self._both), self._both)
            out, back = self._left
        if (out or back) and now > self._now:
            self._work(min(now - self._now, out or back), 1.0)
        self._now = now

    def _work(self, seconds: float, rate: float) -> None:
        work = seconds * rate
        before = self._all[_OUT] - self._left[_OUT]
        out, back = self._left[_OUT] - work, self._left[_BACK] - work
        self._left = [out if out > _NOTHING else 0.0, back if back > _NOTHING else 0.0]
        while self._outs and self._outs[0][0] <= self._all[_OUT] - self._left[_OUT]:
            end, block = self._outs.popleft()
            self.out_ended[block] = self._now + (end - before) / rate
        self._now += seconds

    def begin(self, direction: int, block: int, seconds: float) -> float:
        self._left[direction] += seconds
        self._all[direction] += seconds
        if direction == _OUT:
            self._outs.append((self._all[_OUT], block))
        return self._all[direction]

    def until_end(self, direction: int, copy: float) -> float:
        """The seconds until a copy ends, if no other one begins."""
        work = copy - self._all[direction] + self._left[direction]
        beside = min(work, self._left[1 - direction])
        return beside / self._both + work - beside if work > _NOTHING else 0.0


def latest_reloads(moments: Moments, release: Mapping[int, int], link: Link, lead: float) -> list[int]:
    """The moment of each block at which its reload must begin, so that all are in time on a slower link.

    lead: how many times slower; with 0, and for a block that does not leave, it is the moment of its use.
    """
    back = list(moments.used)
    if lead == 0:
        return back
    clock, nbytes, loose, returns = moments.clock, moments.nbytes, moments.loose, moments.returns
    slowness, latency = lead / link.back, lead * link.latency
    free = float("inf")
    for b in reversed(moments.by_use):
        if b in release and returns[b]:
            use = back[b]
            at = clock[use]
            seconds = nbytes[b] * slowness + latency
            free = (at if at < free else free) - seconds
            if free < at - 4 * seconds:
                free = at - 4 * seconds  # a queue that cannot keep up must not push reloads ever further ahead
            begin = bisect_right(clock, free, 0, use + 1) - 1
            back[b] = begin if begin > loose[b] else loose[b]
    return back


def early_reloads(moments: Moments, budget: int, release: Mapping[int, int], back: list[int]) -> dict[int, int]:
    """The moment at which each block that left comes back: in the order of use, and as early as memory allows.

    back: the moment of each block by which there is room for it in any case. A block that is never used does not
    come back; its moment is that of its end.
    """
    nbytes, used, dropped = moments.nbytes, moments.used, moments.dropped
    order = [b for b in moments.by_use if b in release and used[b] < dropped[b]]
    latest = _running_maxima([back[b] for b in order])
    # Counted as if no block were dropped before one that is used earlier, so that what is reloaded is always a
    # beginning of `order`, and its bytes are one number.
    until = _running_maxima([dropped[b] for b in order])
    size = len(moments)
    change = [0] * (size + 1)
    for b, end in zip(order, until, strict=True):
        change[release[b]] -= nbytes[b]
        if end != dropped[b]:
            change[dropped[b]] += nbytes[b]
            change[end] -= nbytes[b]
    reload: dict[int, int] = {}
    if len(order) < len(release):
        for b in release:
            if used[b] == dropped[b]:  # never used: it does not come back
                change[release[b]] -= nbytes[b]
                change[dropped[b]] += nbytes[b]
                reload[b] = dropped[b]
    held = list(map(int.__add__, moments.full, accumulate(change)))
    highest: deque[int] = deque()  # moments of falling memory, from now to the end of the next block
    returned = 0
    now = seen = min(release.values(), default=0)
    for b, last, end in zip(order, latest, until, strict=True):
        if release[b] >= now:
            now = release[b] + 1
        room = budget - returned - nbytes[b]
        while seen < end:
            need = held[seen]
            while highest and held[highest[-1]] <= need:
                highest.pop()
            highest.append(seen)
            seen += 1
        if last > used[b]:
            last = used[b]
        while now < last:
            while highest and highest[0] < now:
                highest.popleft()
            if not highest or held[highest[0]] <= room:
                break
            now = min(highest[0] + 1, last)
        reload[b] = now
        returned += nbytes[b]
    return reload


def _running_maxima(values: list[int]) -> list[int]:
    """Of each place the highest value up to there."""
    return list(accumulate(values, max))

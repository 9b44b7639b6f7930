"""When blocks that left are brought back."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping
from itertools import accumulate

from .link import Link
from .moments import Moments


def latest_reloads(moments: Moments, release: Mapping[int, int], link: Link, lead: float) -> list[int]:
    """The moment of each block at which its reload must begin, so that all are in time on a slower link.

    lead: how many times slower; with 0, and for a block that does not leave, it is the moment of its use.
    """
    back = list(moments.used)
    if lead == 0:
        return back
    clock, nbytes, loose = moments.clock, moments.nbytes, moments.loose
    slowness, latency = lead / link.back, lead * link.latency
    free = float("inf")
    for b in reversed(moments.by_use):
        if b in release and back[b] < len(clock):
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

"""Which blocks leave, and the last moment at which the memory of each must be given up."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush, heapreplace

from .moments import Moments


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

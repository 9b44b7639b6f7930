"""Which blocks leave, and the last moment at which the memory of each must be given up."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace

from .moments import Moments


@dataclass(frozen=True)
class Selection:
    """release: the moment of each block that leaves. over: bytes by which the budget is passed all the same."""

    release: dict[int, int]
    over: int


class Selector:
    """Goes through a step and lets blocks go where memory would pass the budget.

    moments, backward: the step, and the moment at which the backward of each block's layer begins.
    """

    def __init__(self, moments: Moments, budget: int, backward: Sequence[int]) -> None:
        self._moments = moments
        self._excess = [full - budget for full in moments.full]
        nbytes = moments.nbytes
        # Last used first; of one layer the largest first, which is the fewest copies.
        self._ranked = sorted(range(len(nbytes)), key=nbytes.__getitem__, reverse=True)
        self._ranked.sort(key=backward.__getitem__, reverse=True)
        self._rank = [0] * len(nbytes)
        for rank, b in enumerate(self._ranked):
            self._rank[b] = rank
        self._backward = backward

    def select(self, ready: Sequence[float], back: Sequence[int], stays: Collection[int] = ()) -> Selection:
        """The blocks that leave.

        ready: when each block's copy out would end, in seconds; back: the moment from which it takes memory again;
        stays: blocks that do not leave.

        Of the blocks whose copy has ended, that one goes which is used last. Where there is none, the device waits
        for the copy that ends first.
        """
        moments, rank, ranked = self._moments, self._rank, self._ranked
        clock, nbytes = moments.clock, moments.nbytes
        queue = sorted(range(len(nbytes)), key=ready.__getitem__)
        due = [0] * (len(moments) + 1)  # bytes that come back, by moment
        ripe: list[int] = []  # ranks of the blocks whose copy has ended
        release: dict[int, int] = {}
        taken = bytearray(len(nbytes))
        for b in stays:
            taken[b] = 1
        place = away = over = 0
        for g, beyond in enumerate(self._excess):
            away -= due[g]
            excess = beyond - away
            if excess <= 0:
                continue
            now = clock[g]
            while place < len(queue) and ready[queue[place]] <= now:
                b = queue[place]
                place += 1
                if not taken[b]:
                    heappush(ripe, rank[b])
            while excess > 0:
                if ripe:
                    b = ranked[heappop(ripe)]
                    if back[b] <= g:
                        continue
                    if ripe and excess <= nbytes[ranked[ripe[0]]] and self._same_layer(b, ranked[ripe[0]]):
                        b = ranked[heapreplace(ripe, rank[b])]  # the next largest is enough
                else:
                    first = self._next(queue, place, g, back, taken)
                    if first is None:
                        break
                    b = first
                taken[b] = 1
                release[b] = g
                due[back[b]] += nbytes[b]
                away += nbytes[b]
                excess -= nbytes[b]
            if excess > over:
                over = excess
        return Selection(release, over)

    def _same_layer(self, a: int, b: int) -> bool:
        return self._backward[a] == self._backward[b]

    def _next(
        self, queue: Sequence[int], place: int, g: int, back: Sequence[int], taken: Sequence[int]
    ) -> int | None:
        """The block whose copy ends first, of those that were saved before and are not back yet."""
        saved = self._moments.saved
        for i in range(place, len(queue)):
            b = queue[i]
            if not taken[b] and saved[b] < g < back[b]:
                return b
        return None

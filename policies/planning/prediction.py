"""How long a step takes under a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .link import Link
from .moments import Moments

_OUT, _RELEASE, _RELOAD, _USE = range(4)


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


def predict(moments: Moments, release: Mapping[int, int], reload: Mapping[int, int], link: Link) -> Prediction:
    """Runs a plan on the compute stream and two queues of copies.

    A copy begins when it is issued and those before it in its direction have ended. It has its share of its rate
    while the other direction is busy with what was issued before; what comes later is left out, so that on a link
    whose directions share much the step may be longer.
    """
    clock, nbytes, saved, used = moments.clock, moments.nbytes, moments.saved, moments.used
    by_use, rank = moments.by_use, moments.use_rank
    # What happens, in order: the moment, what it is, and the block in the order of its kind, as one number.
    width = len(nbytes).bit_length()
    mask = (1 << width) - 1
    step = width + 2
    out, released, back, use = (kind << width for kind in (_OUT, _RELEASE, _RELOAD, _USE))
    events = [saved[b] << step | out | b for b in sorted(release)]
    events += [g << step | released | b for b, g in release.items()]
    events += [g << step | back | rank[b] for b, g in reload.items() if g < len(clock)]
    events += [used[b] << step | use | rank[b] for b in reload if used[b] < len(clock)]
    events.sort()
    out_rate, back_rate, latency, both = link.out, link.back, link.latency, link.both
    late = out_free = back_free = 0.0
    copied: dict[int, float] = {}
    arrived = [0.0] * len(nbytes)
    waits: list[PredictedWait] = []
    for event in events:
        g = event >> step
        now = clock[g] + late
        kind = event >> width & 3
        x = event & mask
        if kind == _OUT:
            begin = now if now > out_free else out_free
            seconds = nbytes[x] / out_rate + latency
            out_free = begin + seconds if begin >= back_free else _shared(begin, seconds, back_free, both)
            copied[x] = out_free
        elif kind == _RELOAD:
            begin = now if now > back_free else back_free
            seconds = nbytes[by_use[x]] / back_rate + latency
            back_free = begin + seconds if begin >= out_free else _shared(begin, seconds, out_free, both)
            arrived[x] = back_free
        elif kind == _RELEASE:
            if copied[x] > now:
                waits.append(PredictedWait(g, x, True, copied[x] - now))
                late += copied[x] - now
        elif arrived[x] > now:
            waits.append(PredictedWait(g, by_use[x], False, arrived[x] - now))
            late += arrived[x] - now
    return Prediction(moments.end + late, waits, copied)


def _shared(begin: float, seconds: float, other: float, both: float) -> float:
    """When a copy ends that has only its share of the rate until `other`, when the other direction is idle."""
    overlap = other - begin
    if overlap * both >= seconds:
        return begin + seconds / both
    return begin + overlap + seconds - overlap * both

"""The positions of a step, with those between which no time passes taken together."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

# Of a step's time: what is nearer together is one moment. A plan's times are wrong by so much at most.
_GRAIN = 1 / 20_000


class Moments:
    """A step as the passes of the planner go through it.

    A moment begins with the drops of blocks and goes on with events that only add memory, so that its actions are
    all taken at one position, after the drops, and memory is exact for each position: what is called `full` here is
    the most between one moment's actions and the next's.

    Of each moment: full, the most bytes of device memory if no block ever leaves; clock, when it comes, in seconds
    from the beginning and without stalls; action, the position at which its actions are taken. Of each block, as in
    a `Profile`: nbytes, and the moments saved, used and dropped; and loose, the first at which it may be released.
    total: the bytes of all of them. end: the seconds of the step.
    by_use: the blocks in the order of their first uses. use_rank: the place of each in it.

    It is made from what a `Profile` has for each position; its `clock` has the end too.
    """

    def __init__(
        self,
        clock: Sequence[float],
        full: Sequence[int],
        nbytes: Sequence[int],
        saved: Sequence[int],
        loose: Sequence[int],
        used: Sequence[int],
        dropped: Sequence[int],
    ) -> None:
        positions = len(full)
        drops = bytearray(positions + 1)
        for d in dropped:
            drops[d] = 1
        self.action, place = _moments(clock, drops, positions)
        bounds = [*self.action, positions]
        self.full = [max(full[a:z]) for a, z in zip(bounds, bounds[1:])]  # noqa: B905, RUF007 - fast
        self.clock = [clock[k] for k in self.action]
        self.end = clock[-1]
        self.nbytes = list(nbytes)
        self.total = sum(self.nbytes)
        self.saved = [place[k] for k in saved]
        self.loose = [max(g + 1, bisect_left(self.action, k)) for g, k in zip(self.saved, loose, strict=True)]
        self.used = [place[k] for k in used]
        self.dropped = [place[k] for k in dropped]
        self.by_use = sorted(range(len(self.nbytes)), key=self.used.__getitem__)
        self.use_rank = [0] * len(self.nbytes)
        for rank, b in enumerate(self.by_use):
            self.use_rank[b] = rank

    def __len__(self) -> int:
        return len(self.full)


def _moments(clock: Sequence[float], drops: Sequence[int], positions: int) -> tuple[list[int], list[int]]:
    """The position of each moment's actions, and the moment of each position and of the end."""
    grain = clock[-1] * _GRAIN
    action: list[int] = []
    place: list[int] = []
    begun = acts = 0
    until = -1.0  # a moment's latest position in time
    added = False  # whether a moment has had more than drops
    for k, (at, drop) in enumerate(zip(clock, drops)):  # noqa: B905 - both have one for the end
        if at > until or (drop and added) or k == positions:
            if k:
                place += [len(action)] * (k - begun)
                action.append(acts)
            begun = acts = k
            until = at + grain
            added = not drop
        elif not added:
            acts = k
            added = not drop
    place.append(len(action))
    return action, place

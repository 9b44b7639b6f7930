"""What a step does at each of its events, and how long it takes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class Profile:
    """One step, by positions: position k is the k-th event of the step, counted from 0.

    seconds[k]: compute time from position k to the next, without stalls.
    unmovable[k]: the most bytes of device memory in between that are not blocks.
    standing[k]: of those, the bytes that are allocated at the position itself; the rest is transient. Empty means
        that nothing is known of it.

    Blocks are numbered in the order of their saves:

    nbytes[b]: its size. saved[b], used[b], dropped[b]: the positions at which it is saved, first used in backward,
        and dropped; the number of positions where that comes after the step.
    backward[b]: the position at which the backward of its layer begins; blocks with the same one return together.
    loose[b]: the first position at which its release frees its memory, as nobody beside backward has it any more.
        Empty means that it is the one after the save.

    Raises ValueError for sequences that do not fit together, and for lives that are not in this order.
    """

    seconds: Sequence[float]
    unmovable: Sequence[int]
    nbytes: Sequence[int]
    saved: Sequence[int]
    used: Sequence[int]
    dropped: Sequence[int]
    backward: Sequence[int]
    standing: Sequence[int] = ()
    loose: Sequence[int] = ()

    def __post_init__(self) -> None:
        positions, blocks = len(self.seconds), len(self.nbytes)
        if len(self.unmovable) != positions or len(self.standing) not in (0, positions):
            raise ValueError(
                f"seconds are of {positions} positions, unmovable of {len(self.unmovable)}, "
                f"standing of {len(self.standing)}"
            )
        loose = len(self.loose) or blocks
        if {len(self.saved), len(self.used), len(self.dropped), len(self.backward), loose} != {blocks}:
            raise ValueError(
                f"nbytes are of {blocks} blocks, saved of {len(self.saved)}, used of {len(self.used)}, dropped of "
                f"{len(self.dropped)}, backward of {len(self.backward)}, loose of {loose}"
            )
        before = 0
        for b, (saved, used, dropped) in enumerate(zip(self.saved, self.used, self.dropped, strict=True)):
            if not before <= saved < used <= dropped <= positions:
                raise ValueError(
                    f"block {b} is saved at {saved}, used at {used} and dropped at {dropped}, of {positions} "
                    f"positions, after a block that is saved at {before}"
                )
            before = saved

    @cached_property
    def clock(self) -> list[float]:
        """When each position comes, and the end, in seconds from the first and without stalls."""
        return [0.0, *accumulate(self.seconds)]

    @property
    def compute(self) -> float:
        """The seconds of the step without stalls, added up as those of plans are."""
        return self.clock[-1]

    @cached_property
    def full(self) -> list[int]:
        """The most bytes of device memory from each position to the next, if no block ever leaves."""
        change = [0] * (len(self.seconds) + 1)
        for nbytes, saved, dropped in zip(self.nbytes, self.saved, self.dropped, strict=True):
            change[saved] += nbytes
            change[dropped] -= nbytes
        return list(map(int.__add__, self.unmovable, accumulate(change)))

    @cached_property
    def moments(self) -> Moments:
        """The positions as the planner sees them."""
        loose = self.loose or [saved + 1 for saved in self.saved]
        return Moments(self.clock, self.full, self.nbytes, self.saved, loose, self.used, self.dropped)

    @property
    def transient(self) -> list[int]:
        """The bytes that come from each position to the next beside what is allocated there, at most."""
        return list(map(int.__sub__, self.unmovable, self.standing or self.unmovable))

    def ending_below(self, nbytes: int) -> Profile:
        """The step if it takes at most so many bytes from the last use of a block on, beside what stands then."""
        last = max(self.used, default=0)
        ends = [
            max(low, min(top, nbytes)) for top, low in zip(self.unmovable[last:], self.standing[last:], strict=True)
        ]
        return replace(self, unmovable=[*self.unmovable[:last], *ends])

    def fuller(self, more: Sequence[int], transient: Sequence[int] = ()) -> Profile:
        """The step with so many bytes more at each position.

        transient: of all bytes at each position, those that are transient, where these are more than now. What
        stands at the first position remains, as steps are told apart by it.
        """
        unmovable = list(map(int.__add__, self.unmovable, more))
        if not self.standing:
            return replace(self, unmovable=unmovable)
        least = list(map(max, self.transient, transient)) if transient else self.transient
        standing = list(map(int.__sub__, unmovable, least))
        return replace(self, unmovable=unmovable, standing=[self.standing[0], *standing[1:]])

    def standing_at(self, standing: Sequence[int]) -> Profile:
        """The step as it is when so much memory is allocated at each position.

        What is transient is as much as in this one: between two positions that is what comes above both.
        """

        def higher(at: Sequence[int]) -> list[int]:
            return list(map(max, at, [*at[1:], *standing[:1]]))

        transient = map(int.__sub__, self.unmovable, higher(self.standing))
        unmovable = [low + max(0, more) for low, more in zip(higher(standing), transient, strict=True)]
        return replace(self, unmovable=unmovable, standing=standing)

    def scaled(self, ratio: float, more: int = 0) -> Profile:
        """The step with blocks, times and transient memory `ratio` times as large, and `more` bytes beside them.

        What stays allocated does not shrink with them, as nobody knows how much of it are gradients. For a larger
        step all that has come since the first position grows. What is more is there from the beginning on. What
        comes after the last use it stays: that may be what makes the difference, as an optimizer's states do.
        """
        standing = self.standing or [0] * len(self.unmovable)
        if ratio <= 1:
            unmovable = [int(low + (top - low) * ratio) for low, top in zip(standing, self.unmovable, strict=True)]
        else:
            fixed = standing[0] if standing else 0
            unmovable = [max(top, int(fixed + (top - fixed) * ratio)) for top in self.unmovable]
        if more:
            uses = (used for used, dropped in zip(self.used, self.dropped, strict=True) if used < dropped)
            last = max(uses, default=len(unmovable))
            unmovable, standing = (
                [*(nbytes + more for nbytes in each[:last]), *each[last:]] for each in (unmovable, standing)
            )
        return replace(
            self,
            seconds=[seconds * ratio for seconds in self.seconds],
            unmovable=unmovable,
            standing=standing if self.standing else (),
            nbytes=[int(nbytes * ratio) for nbytes in self.nbytes],
        )


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

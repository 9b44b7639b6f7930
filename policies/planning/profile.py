"""A step as it is planned for: its profile, the link, what a plan says, and the bounds that none can pass."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from itertools import accumulate
from math import fsum

from ...sizes import format_bytes


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
    earlier[b]: the block whose bytes it has, after that has been used; -1 for none. Where that one has left, its
        copy on the host can be retained, and this one leaves without another. Empty means that there are none.

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
    earlier: Sequence[int] = ()

    def __post_init__(self) -> None:
        positions, blocks = len(self.seconds), len(self.nbytes)
        if len(self.unmovable) != positions or len(self.standing) not in (0, positions):
            raise ValueError(
                f"seconds are of {positions} positions, unmovable of {len(self.unmovable)}, "
                f"standing of {len(self.standing)}"
            )
        loose, earlier = len(self.loose) or blocks, len(self.earlier) or blocks
        if {len(self.saved), len(self.used), len(self.dropped), len(self.backward), loose, earlier} != {blocks}:
            raise ValueError(
                f"nbytes are of {blocks} blocks, saved of {len(self.saved)}, used of {len(self.used)}, dropped of "
                f"{len(self.dropped)}, backward of {len(self.backward)}, loose of {loose}, earlier of {earlier}"
            )
        if any(e >= b for b, e in enumerate(self.earlier)):
            raise ValueError("a block cannot have the bytes of one that is saved later")
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

    @property
    def in_forward(self) -> float:
        """The seconds to where the first backward of a layer begins, without stalls."""
        return self.clock[min(self.backward, default=-1)]

    @property
    def in_backward(self) -> float:
        """The seconds from where the first backward of a layer begins to the end, without stalls."""
        return self.clock[-1] - self.in_forward

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
        earlier = self.earlier or [-1] * len(self.nbytes)
        return Moments(self.clock, self.full, self.nbytes, self.saved, loose, self.used, self.dropped, earlier)

    @property
    def transient(self) -> list[int]:
        """The bytes that come from each position to the next beside what is allocated there, at most."""
        return list(map(int.__sub__, self.unmovable, self.standing or self.unmovable))

    def ending_below(self, nbytes: int, before: int) -> Profile:
        """The step if its optimizer takes at most so many bytes, with all that stands then, and took others in it.

        That comes after the last use of a block, and so does the end of backward.

        before: what the optimizer took in it. Where it had more, that was not for the optimizer.
        """
        last = max(self.used, default=0)
        ends = [
            top if top > before else max(low, min(top, nbytes))
            for top, low in zip(self.unmovable[last:], self.standing[last:], strict=True)
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

    def eased(self, budget: int, most: int) -> Profile:
        """The step as plans for a budget see it that may take up to `most` bytes where it has to, whatever leaves.

        There it counts as no more than the budget, to which all else keeps. Where even `most` is too little, it is
        the step as it is.
        """
        if not budget < floor(self.moments) <= most:
            return self
        unmovable, begins = list(self.unmovable), self.moments.action
        for begin, end, low in zip(begins, [*begins[1:], None], self.moments.least, strict=True):
            unmovable[begin:end] = [nbytes - max(0, low - budget) for nbytes in unmovable[begin:end]]
        return replace(self, unmovable=unmovable)

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
    a `Profile`: nbytes and earlier, and the moments saved, used and dropped; loose, the first at which it may be
    released; and returns, whether it is used, for else it does not come back.
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
        earlier: Sequence[int],
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
        self.nbytes, self.earlier = list(nbytes), earlier
        self.total = sum(self.nbytes)
        self.saved = [place[k] for k in saved]
        self.loose = [max(g + 1, bisect_left(self.action, k)) for g, k in zip(self.saved, loose, strict=True)]
        self.used = [place[k] for k in used]
        self.dropped = [place[k] for k in dropped]
        self.returns = [k < d for k, d in zip(used, dropped, strict=True)]
        self.by_use = sorted(range(len(self.nbytes)), key=self.used.__getitem__)
        self.use_rank = [0] * len(self.nbytes)
        for rank, b in enumerate(self.by_use):
            self.use_rank[b] = rank

    def __len__(self) -> int:
        return len(self.full)

    @cached_property
    def least(self) -> list[int]:
        """The least bytes of device memory in each, as of `full`, whatever leaves."""
        return _least(self.full, self.nbytes, self.loose, self.used)


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


class Cause(Enum):
    """What the compute stream waits for."""

    RELEASE = "release"  # the end of a copy out, whose memory is needed
    RELOAD = "reload"  # the end of a copy back, whose block is used


@dataclass(frozen=True)
class PlannedStall:
    """The compute stream waits at a position for the copy of a block."""

    position: int
    block: int
    cause: Cause
    seconds: float


@dataclass(frozen=True)
class Plan:
    """Which blocks leave, and at which positions their actions are taken.

    release, reload: of the blocks that leave, numbered as in the profile. Each is offloaded when it is saved, so
    that saved < loose <= release < reload <= used. early: of those that are offloaded before that, when an earlier
    block was saved whose bytes they have, that position.
    peak: the most bytes of device memory, by count of what is issued and so whatever the copies' times. budget: the
    most that was allowed. seconds: the step as predicted. stalls: of these, the waits. bound: a time that no plan
    within the budget can better. below: the most bytes that are away at once, each from its copy out to its use.
    """

    release: Mapping[int, int]
    reload: Mapping[int, int]
    peak: int
    budget: int
    seconds: float
    stalls: tuple[PlannedStall, ...]
    bound: float
    early: Mapping[int, int] = field(default_factory=dict)
    below: int = 0

    @property
    def waits(self) -> float:
        """The seconds of all stalls."""
        return fsum(stall.seconds for stall in self.stalls)

    def copied_out(self, profile: Profile) -> list[int]:
        """Of the blocks that leave, those that are copied to the host, in the order in which that begins."""
        copied = [b for b in self.release if not profile.earlier or profile.earlier[b] not in self.release]
        return sorted(copied, key=lambda b: (self.early.get(b, profile.saved[b]), b))


@dataclass(frozen=True)
class DiskPlan:
    """What becomes of the blocks that leave the device, where the host cannot hold them all.

    offload, reload: the positions at which the copies to the host and back begin: not before, and not after, those
        of the first plan. spill: of what goes on to disk, the position by which its file must be complete. fetch:
        the position at which to begin to read it; none for a block that nobody uses. plan: the second plan.
    """

    offload: Mapping[int, int]
    reload: Mapping[int, int]
    spill: Mapping[int, int]
    fetch: Mapping[int, int]
    plan: Plan


@dataclass(frozen=True)
class Link:
    """What `tiered-mem probe` measures of the link between device and host, or host and drive.

    Args:
        out: Bytes each second, away from the device.
        back: Bytes each second, back to the device.
        both: Each direction's share of its rate while the other is busy, above 0 and up to 1.
        latency: Seconds that a copy takes beside its bytes.
        drive: The same of the drive below the host; None where there is none.
        room: The bytes that there is room for at its other end, a drive's below it among them; None is any.

    Raises:
        ValueError: A rate or a share is not above 0, a share is above 1, or a latency or the room is below 0.
    """

    out: float
    back: float
    both: float = 1.0
    latency: float = 12e-6
    drive: Link | None = None
    room: int | None = None

    def __post_init__(self) -> None:
        if self.room is not None and self.room < 0:
            raise ValueError(f"at a link's other end there is room for 0 bytes or more, not {self.room}")
        if not (self.out > 0 and self.back > 0 and 0 < self.both <= 1 and self.latency >= 0):
            raise ValueError(
                f"a link has rates above 0 bytes a second, a share above 0 and up to 1, and a latency of 0 s or "
                f"more, not {self.out:g} and {self.back:g} bytes a second, {self.both:g} and {self.latency:g} s"
            )

    def exchange(self, nbytes: int) -> float:
        """The seconds in which bytes cross it in both directions, side by side.

        It is what `both` was measured by: the bytes of both directions together, at their mean rate.

        Args:
            nbytes: The bytes of each direction.
        """
        return max(nbytes / min(self.out, self.back), 2 * nbytes / ((self.out + self.back) * self.both))


class BudgetTooSmall(ValueError):
    """No plan keeps the budget.

    Args:
        budget: In bytes.
        floor: The least budget that the step can be run in, in bytes.
        position: Where it is needed.
        unmovable: The part of the floor that is no block; the rest is in use there, or finds no room.
        where: The position and what is there, in words.
        helps: What would help.
        without_room: The part of the floor that could leave, and finds no room where it would go.
    """

    def __init__(
        self,
        budget: int,
        floor: int,
        position: int,
        unmovable: int,
        where: str | None = None,
        helps: Sequence[str] = (),
        without_room: int = 0,
    ) -> None:
        self.budget, self.floor, self.position, self.unmovable = budget, floor, position, unmovable
        self.without_room = without_room
        super().__init__(
            f"the budget of {format_bytes(budget)} is below {format_bytes(floor)}, the least that this step can "
            f"be run in. In {where or f'position {position}, {format_bytes(unmovable)} cannot move'}. What helps: "
            f"{'; '.join((*helps, f'{format_bytes(floor - budget)} of budget more'))}"
        )


def floor(moments: Moments) -> int:
    """The least budget that a plan can keep, as far as there is room for all that leaves.

    At each moment, what cannot move and the blocks in use, with those that forward still has.
    """
    return max(moments.least, default=0)


def least_bytes(profile: Profile) -> list[int]:
    """The least bytes of device memory from each position to the next, whatever leaves."""
    loose = profile.loose or [saved + 1 for saved in profile.saved]
    return _least(profile.full, profile.nbytes, loose, profile.used)


def _least(full: Sequence[int], nbytes: Sequence[int], loose: Sequence[int], used: Sequence[int]) -> list[int]:
    away = [0] * (len(full) + 1)  # the bytes that may be
    for n, free, u in zip(nbytes, loose, used, strict=True):
        if free < u:
            away[free] += n
            away[u] -= n
    return list(map(int.__sub__, full, accumulate(away)))


def least_seconds(moments: Moments, budget: int, link: Link) -> float:
    """The least time of the step within the budget, on a link without latency and contention.

    At a moment that needs so many bytes away, these were copied out after they were saved, and are copied back
    before they are used. It holds for parts of blocks too, and in any order. It leaves out that both directions
    need the same set.
    """
    saves = [0] * (len(moments) + 1)
    uses = [0] * (len(moments) + 1)
    blocks = zip(moments.nbytes, moments.saved, moments.used, moments.returns, moments.earlier, strict=True)
    for n, s, u, returns, earlier in blocks:
        if returns:
            uses[u] += n
        if earlier < 0:
            saves[s] += n  # what is away then was copied once, and that may have been earlier
    lasts = map(float.__sub__, [*moments.clock[1:], moments.end], moments.clock)
    needs = [full - budget for full in moments.full]
    return least_time(zip(lasts, needs, saves, uses), moments.total, link)  # noqa: B905 - these have an end


def least_time(stretches: Iterable[tuple[float, int, int, int]], later: int, link: Link) -> float:
    """The least time of stretches one after another, as `least_seconds` has it.

    stretches: of each its seconds, the most bytes that have to be away while it goes on, and the bytes of the
    blocks that it saves, and of those that it uses first. later: the bytes of all blocks.
    """
    out_rate, back_rate = link.out, link.back
    before = need = 0
    now = 0.0  # the earliest time of the stretch
    copying = 0.0  # when copying without a pause must have begun for all that was saved before to be out
    returned = float("-inf")  # when all that was away would be back
    last = 0.0
    for seconds, needed, save, use in stretches:
        now += last
        last = seconds
        if need > 0 and now + need / back_rate > returned:
            returned = now + need / back_rate
        if use:
            later -= use
        if returned - later / back_rate > now:
            now = returned - later / back_rate
        if now - before / out_rate > copying:
            copying = now - before / out_rate
        need = needed
        if need > 0 and copying + need / out_rate > now:
            now = copying + need / out_rate
        before += save
    return now + last

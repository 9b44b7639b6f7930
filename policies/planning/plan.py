"""What a plan says, the link that it counts with, and the bounds that none can pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from math import fsum

from ...sizes import format_bytes
from .profile import Moments


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
    that saved < loose <= release < reload <= used.
    peak: the most bytes of device memory, by count of what is issued and so whatever the copies' times. budget: the
    most that was allowed. seconds: the step as predicted. stalls: of these, the waits. bound: a time that no plan
    within the budget can better.
    """

    release: Mapping[int, int]
    reload: Mapping[int, int]
    peak: int
    budget: int
    seconds: float
    stalls: tuple[PlannedStall, ...]
    bound: float

    @property
    def waits(self) -> float:
        """The seconds of all stalls."""
        return fsum(stall.seconds for stall in self.stalls)


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

    out, back: bytes each second, away from the device and back to it.
    both: each direction's share of its rate while the other is busy, above 0 and up to 1.
    latency: seconds that a copy takes beside its bytes.
    drive: the same of the drive below the host; None where there is none.

    Raises ValueError for a rate or a share that is not above 0, a share above 1, and a latency below 0.
    """

    out: float
    back: float
    both: float = 1.0
    latency: float = 12e-6
    drive: Link | None = None

    def __post_init__(self) -> None:
        if not (self.out > 0 and self.back > 0 and 0 < self.both <= 1 and self.latency >= 0):
            raise ValueError(
                f"a link has rates above 0 bytes a second, a share above 0 and up to 1, and a latency of 0 s or "
                f"more, not {self.out:g} and {self.back:g} bytes a second, {self.both:g} and {self.latency:g} s"
            )

    def exchange(self, nbytes: int) -> float:
        """The seconds in which so many bytes cross it in both directions, side by side."""
        return nbytes / (min(self.out, self.back) * self.both)


class BudgetTooSmall(ValueError):
    """No plan keeps the budget.

    budget, floor: bytes; the floor is the least budget that the step can be run in. position: where it is needed.
    unmovable: the part of the floor that is no block; the rest is in use there. where: the position and what is
    there, in words. helps: what would help.
    """

    def __init__(
        self,
        budget: int,
        floor: int,
        position: int,
        unmovable: int,
        where: str | None = None,
        helps: Sequence[str] = (),
    ) -> None:
        self.budget, self.floor, self.position, self.unmovable = budget, floor, position, unmovable
        super().__init__(
            f"the budget of {format_bytes(budget)} is below {format_bytes(floor)}, the least that this step can "
            f"be run in. In {where or f'position {position}, {format_bytes(unmovable)} cannot move'}. What helps: "
            f"{'; '.join((*helps, f'{format_bytes(floor - budget)} of budget more'))}"
        )


def floor(moments: Moments) -> tuple[int, int, int]:
    """The least budget that a plan can keep, the moment that needs it, and the bytes there that are no blocks.

    At each moment, what cannot move and the blocks in use, with those that forward still has.
    """
    change = [0] * (len(moments) + 1)  # of the bytes that may be away
    for n, free, u in zip(moments.nbytes, moments.loose, moments.used, strict=True):
        if free < u:
            change[free] += n
            change[u] -= n
    least = list(map(int.__sub__, moments.full, accumulate(change)))
    if not least:
        return 0, 0, 0
    worst = least.index(max(least))
    lives = zip(moments.nbytes, moments.saved, moments.dropped, strict=True)
    return least[worst], worst, moments.full[worst] - sum(n for n, s, d in lives if s <= worst < d)


def least_seconds(moments: Moments, budget: int, link: Link) -> float:
    """The least time of the step within the budget, on a link without latency and contention.

    At a moment that needs so many bytes away, these were copied out after they were saved, and are copied back
    before they are used. It holds for parts of blocks too, and in any order. It leaves out that both directions
    need the same set.
    """
    out_rate, back_rate = link.out, link.back
    saves = [0] * (len(moments) + 1)
    uses = [0] * (len(moments) + 1)
    for n, s, u in zip(moments.nbytes, moments.saved, moments.used, strict=True):
        saves[s] += n
        uses[u] += n
    later = moments.total
    before = need = 0
    now = 0.0  # the earliest time of the moment
    copying = 0.0  # when copying without a pause must have begun for all that was saved before to be out
    returned = float("-inf")  # when all that was away would be back
    last = 0.0
    for full, at, save, use in zip(moments.full, moments.clock, saves, uses):  # noqa: B905 - these have an end
        now += at - last
        last = at
        if need > 0 and now + need / back_rate > returned:
            returned = now + need / back_rate
        if use:
            later -= use
        if returned - later / back_rate > now:
            now = returned - later / back_rate
        if now - before / out_rate > copying:
            copying = now - before / out_rate
        need = full - budget
        if need > 0 and copying + need / out_rate > now:
            now = copying + need / out_rate
        before += save
    return now + moments.end - last

"""What a planner has decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import fsum


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

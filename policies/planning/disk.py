"""What goes on from the host to disk: a second plan of the same kind."""

from __future__ import annotations

from .link import Link
from .plan import DiskPlan, Plan
from .planner import plan
from .profile import Profile


def plan_disk(profile: Profile, first: Plan, host_budget: int, drive: Link) -> DiskPlan:
    """Plans the drive for a step whose plan for the device is `first`.

    To the drive the host is what the device is to the link: a block is there from its offload to the end of its
    reload, which is at the latest its use, and is needed there at its reload. Nothing else takes room. The times
    are those of the first plan, with its stalls.

    host_budget: bytes; what is under way needs room too, an eighth of it. Raises BudgetTooSmall where the host
    cannot hold what is on its way out.
    """
    seconds = list(profile.seconds)
    for stall in first.stalls:
        seconds[max(0, stall.position - 1)] += stall.seconds
    leaving = sorted(first.release)
    positions = len(seconds)
    second = Profile(
        seconds,
        [0] * positions,
        [profile.nbytes[b] for b in leaving],
        [profile.saved[b] for b in leaving],
        [first.reload[b] for b in leaving],
        [min(profile.used[b] + 1, positions) for b in leaving],
        [first.reload[b] for b in leaving],
    )
    made = plan(second, host_budget - host_budget // 8, drive)
    return DiskPlan(
        {leaving[i]: k for i, k in made.release.items()}, {leaving[i]: k for i, k in made.reload.items()}, made
    )

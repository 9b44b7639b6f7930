"""How device memory is shared between activations and optimizer states."""

from __future__ import annotations

from dataclasses import dataclass

from .bound import BudgetTooSmall
from .link import Link
from .planner import plan
from .profile import Profile

# So many amounts are compared, each for a step with a plan of so many attempts.
_AMOUNTS = 8
_ATTEMPTS = 3


@dataclass
class StatesShare:
    """What there is to say between whoever has optimizer states and whoever plans for activations.

    total: the bytes of states that may stay on the device between steps. kept: of those that are there by now.
    target: how many shall be; None as long as nothing is planned.
    passing: how many bytes of the device they had better pass through while the optimizer steps. None: any.
    """

    total: int = 0
    kept: int = 0
    target: int | None = None
    passing: int | None = None

    @property
    def planned(self) -> int:
        return self.target or 0


def states_to_keep(profile: Profile, budget: int, link: Link, total: int) -> int:
    """Of `total` bytes of optimizer states, those that had better stay on the device.

    What stays takes room from activations all the time, and then these wait for more copies, hidden as they are.
    What does not crosses the link in both directions while the optimizer steps, where nothing hides that. The
    least sum of both counts; of equal ones the one that keeps the least. Raises BudgetTooSmall.
    """
    rate = min(link.out, link.back) * link.both
    best, least = 0, float("inf")
    for part in range(_AMOUNTS + 1):
        kept = total * part // _AMOUNTS
        try:
            seconds = plan(profile, budget - kept, link, attempts=_ATTEMPTS).seconds
        except BudgetTooSmall:
            if not kept:
                raise
            break
        seconds += (total - kept) / rate
        if seconds < least:
            best, least = kept, seconds
    return best

"""How device memory is shared between activations and optimizer states."""

from __future__ import annotations

from dataclasses import dataclass

from .bound import floor
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
    step_peak: the most bytes of the device while the optimizer steps, with all else and without those kept.
    rounding: by which torch's pool may give more for what is kept than is asked for.
    registered: whether there is an optimizer, wherever its states are. at_once: whether one is stepped at once.
    """

    total: int = 0
    kept: int = 0
    target: int | None = None
    passing: int | None = None
    step_peak: int = 0
    rounding: int = 0
    registered: bool = False
    at_once: bool = False

    @property
    def planned(self) -> int:
        return self.target or 0

    def fit(self, budget: int) -> bool:
        """Whether what shall be kept leaves the optimizer's step its room."""
        return not self.target or self.target + self.step_peak <= budget


def states_to_keep(profile: Profile, budget: int, link: Link, states: StatesShare) -> tuple[int, float]:
    """How many bytes of optimizer states had better stay on the device, and the seconds of the step then.

    What stays takes room from activations all the time, and then these wait for more copies, hidden as they are.
    What does not crosses the link in both directions while the optimizer steps, where nothing hides that. The
    least sum of both counts; of equal ones the one that keeps the least. It is compared for eight parts of all
    states, and for the most that there is room for. Raises BudgetTooSmall.
    """
    room = budget - states.rounding - max(states.step_peak, floor(profile.moments)[0])
    amounts = {states.total * part // _AMOUNTS for part in range(_AMOUNTS + 1)}
    amounts.add(max(0, min(room, states.total)))
    best, least = 0, float("inf")
    for kept in sorted(amounts):
        if 0 < kept > room:
            break
        seconds = plan(profile, budget - kept, link, attempts=_ATTEMPTS).seconds
        seconds += link.exchange(states.total - kept)
        if seconds < least:
            best, least = kept, seconds
    return best, least

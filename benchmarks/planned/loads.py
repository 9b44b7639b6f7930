"""Steps of one training whose blocks have other sizes in each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tiered_mem.policies.planning.profile import Profile


def memory(profile: Profile) -> list[int]:
    """The most bytes of device memory at each position, if nothing moves."""
    change = [0] * (len(profile.seconds) + 1)
    for nbytes, saved, dropped in zip(profile.nbytes, profile.saved, profile.dropped, strict=True):
        change[saved] += nbytes
        change[dropped] -= nbytes
    found, now = [], 0
    for more, unmovable in zip(change, profile.unmovable, strict=False):
        now += more
        found.append(now + unmovable)
    return found


def alike(steps: Sequence[Profile]) -> bool:
    """Whether the steps have the same events and blocks, but for sizes and times."""
    return len({(len(step.seconds), *step.saved, *step.used, *step.dropped) for step in steps}) == 1


def fullest(steps: Sequence[Profile]) -> Profile:
    """The last of the steps, with as much memory at each position as the fullest of them has there."""
    last = steps[-1]
    more = (max(at) - at[-1] for at in zip(*map(memory, steps), strict=True))
    return replace(last, unmovable=list(map(int.__add__, last.unmovable, more)))

"""Steps of one training whose blocks have other sizes in each."""

from __future__ import annotations

from collections.abc import Sequence

from tiered_mem.policies.planning.profile import Profile


def alike(steps: Sequence[Profile]) -> bool:
    """Whether the steps have the same events and blocks, but for sizes and times."""
    return len({(len(step.seconds), *step.saved, *step.used, *step.dropped) for step in steps}) == 1


def fullest(steps: Sequence[Profile]) -> Profile:
    """The last of the steps, with as much memory at each position as the fullest of them has there."""
    last = steps[-1]
    return last.fuller([max(at) - at[-1] for at in zip(*(step.full for step in steps), strict=True)])

"""A plan as a policy that answers by position, whatever it is told."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tiered_mem.policies import Action, Event, Offload, Policy, Release, Reload
from tiered_mem.policies.base import Used
from tiered_mem.policies.planning import Plan, Profile


class Played(Policy):
    """Plays a plan once. The keys of the blocks are their numbers."""

    asks = (Used,)

    def __init__(self, profile: Profile, plan: Plan) -> None:
        self._actions: defaultdict[int, list[Action]] = defaultdict(list)
        for b in plan.release:
            self._actions[profile.saved[b]].append(Offload(b))
        for b, k in plan.release.items():
            self._actions[k].append(Release(b))
        for b in sorted(plan.reload, key=profile.used.__getitem__):
            self._actions[plan.reload[b]].append(Reload(b))
        self._position = -1

    def decide(self, event: Event) -> Sequence[Action]:
        self._position += 1
        return self._actions.get(self._position, ())

"""What a policy is told, and what is done about its answers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from .block import Block
from .errors import PolicyError
from .policies import Action, Dropped, Event, Fetch, Offload, Policy, Release, Reload, Spill
from .store import BlockStore


class PolicyActions:
    """Does what a policy advises. One thread at a time."""

    def __init__(self, policy: Policy, store: BlockStore) -> None:
        self._policy = policy
        self._store = store
        self._do = {
            Offload: store.offload,
            Release: store.release,
            Reload: store.reload_early,
            Spill: store.spill,
            Fetch: store.fetch,
        }
        self._postponed: list[Action] = []

    def tell(self, event: Event) -> None:
        """Tells the policy, and does what it answers."""
        self.act(self._policy.decide(event))

    def let_go(self, block: Block) -> None:
        """One saved tensor less needs the block. What the policy answers to its end is done by `go_on`.

        This may be called within a `__del__`, which is no place to start copies.
        """
        if self._store.let_go(block):
            self._postponed += self._policy.decide(Dropped(block.key))

    def go_on(self) -> None:
        """Does what was postponed."""
        if self._postponed:
            actions, self._postponed = self._postponed, []
            self.act(actions)

    def act(self, actions: Sequence[Action]) -> None:
        """Does what a policy has answered, or could have. Raises PolicyError for what is not an action."""
        if not actions:
            return
        for kind, group in itertools.groupby(actions, type):
            alike = list(group)
            if kind not in self._do:
                raise PolicyError(f"{type(self._policy).__name__} answered {alike[0]!r}, which is not an action")
            # Advice about a block that is gone by now is passed over; the same advice twice is advice once.
            keys = dict.fromkeys(action.key for action in alike)
            blocks = [block for key in keys if (block := self._store.find(key)) is not None]
            self._do[kind](blocks)

"""What a policy is told, and what is done about its answers."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import Any

from .block import Block
from .errors import PolicyError
from .policies import Action, Dropped, Event, Fetch, HostPressure, Offload, Policy, Release, Reload, Spill
from .store import BlockStore


class PolicyActions:
    """Does what a policy advises. One thread at a time."""

    def __init__(self, policy: Policy, store: BlockStore) -> None:
        self._policy = policy
        self._store = store
        self._do: dict[type[Any], Callable[[Sequence[Block]], None]] = {
            Offload: store.offload,
            Release: store.release,
            Reload: store.reload_early,
            Spill: store.spill,
            Fetch: store.fetch,
        }
        self._ended: deque[Block] = deque()

    def tell(self, event: Event) -> None:
        """Tells the policy, and does what it answers."""
        self.act(self._policy.decide(event))

    def let_go(self, block: Block) -> None:
        """One saved tensor less needs the block. The policy is told of its end by `go_on`.

        This may be called within a `__del__`, which is no place to start copies, nor for a policy to raise.
        """
        if self._store.let_go(block):
            self._ended.append(block)

    def go_on(self) -> None:
        """Tells the policy of the blocks that have ended."""
        if self._ended:
            actions: list[Action] = []
            while self._ended:
                actions += checked(self._policy, self._policy.decide(Dropped(self._ended.popleft().key)))
            self.act(actions)

    def act(self, answer: Iterable[Action]) -> None:
        """Does what a policy has answered, or could have. Raises PolicyError before anything is done."""
        if not answer:
            return
        for kind, group in itertools.groupby(checked(self._policy, answer), type):
            # Advice about a block that is gone by now is passed over; the same advice twice is advice once.
            keys = dict.fromkeys(action.key for action in group)
            blocks = [block for key in keys if (block := self._store.find(key)) is not None]
            self._do[kind](blocks)


def checked(policy: Policy, answer: object) -> list[Action]:
    """What a policy has answered; None is nothing. Raises PolicyError where that is no sequence of actions."""
    if answer is None:
        return []
    name = type(policy).__name__
    if not isinstance(answer, Iterable):
        raise PolicyError(f"{name} answered {answer!r}, which is no sequence of actions")
    actions = list(answer)
    for action in actions:
        if not isinstance(action, Action):
            raise PolicyError(f"{name} answered {action!r}, which is not an action")
        if not isinstance(action.key, Integral):
            raise PolicyError(f"{name} answered {action!r}: the key of a block is an int")
    return actions


def advice(policy: Policy, nbytes: int) -> list[Action]:
    """What a policy lets go down to disk, so that so many bytes of host memory come free. Raises PolicyError."""
    return checked(policy, policy.decide(HostPressure(nbytes)))

"""What a policy is told, and what is done about its answers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import Any

from ..errors import PolicyError
from ..policies import Action, Dropped, Event, Fetch, HostPressure, Offload, Policy, Release, Reload, Saved, Spill
from .block import Block
from .block_store import BlockStore

# Saved and dropped blocks are told together, when so many bytes of them have come.
_GATHERED_BYTES = 64 << 20


class PolicyActions:
    """Does what a policy advises. One thread at a time.

    saver: the graph and the layer that blocks are saved by now.
    enough: so many bytes of blocks, saved or ended, the policy is told of before the next event.
    """

    def __init__(self, policy: Policy, store: BlockStore) -> None:
        self._policy = policy
        self._blocks = store.blocks
        self._do: dict[type[Any], Callable[[Sequence[Block]], None]] = {
            Offload: store.offload,
            Release: store.release,
            Reload: store.reload_early,
            Spill: store.spill,
            Fetch: store.fetch,
        }
        self.enough = min(_GATHERED_BYTES, getattr(policy, "gather_bytes", _GATHERED_BYTES))
        self.saver = (0, 0)

    def tell(self, event: Event) -> None:
        """Tells the policy, and does what it answers."""
        self.tell_news()
        self.act(self._policy.decide(event))

    def saves_come_from(self, graph: int, layer: int) -> None:
        """Another layer is about to save blocks."""
        self.tell_news()
        self.saver = graph, layer

    def tell_news(self) -> None:
        """Tells the policy of the blocks that were saved and that have ended since it last heard of any."""
        if self._blocks.saved:
            self.act(self._policy.decide(Saved(*self.saver, self._blocks.take_saved())))
        if self._blocks.ended:
            self.act(self._policy.decide(Dropped(self._blocks.take_ended())))

    def act(self, answer: Iterable[Action]) -> None:
        """Does what a policy has answered, or could have. Raises PolicyError before anything is done."""
        if not answer:
            return
        find = self._blocks.find
        for kind, group in itertools.groupby(checked(self._policy, answer), type):
            # Advice about a block that is gone by now is passed over; the same advice twice is advice once.
            keys = dict.fromkeys([action.key for action in group])
            self._do[kind]([block for block in map(find, keys) if block is not None])


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
        if type(action.key) is not int and not isinstance(action.key, Integral):
            raise PolicyError(f"{name} answered {action!r}: the key of a block is an int")
    return actions


def advice(policy: Policy, nbytes: int) -> list[Action]:
    """What a policy lets go down to disk, so that so many bytes of host memory come free. Raises PolicyError."""
    return checked(policy, policy.decide(HostPressure(nbytes)))

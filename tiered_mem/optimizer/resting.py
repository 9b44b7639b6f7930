"""What the original optimizer has for a `state` while its states are with the manager."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator, MutableMapping
from typing import Any, Protocol

import torch

from ..errors import Closed
from .layout import State


class Answering(Protocol):
    """Whoever has the states. See `States`."""

    def check(self) -> None: ...
    def keys(self) -> list[Any]: ...
    def copy_of(self, key: Any) -> Any: ...
    def lent_out(self) -> dict[Any, Any] | None: ...


class StatePlace:
    """The `state` of an optimizer: a dictionary of its own, or what answers for it.

    states: has the states. taken: they were taken over, of which the optimizer knows nothing before.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, states: Answering) -> None:
        self._optimizer: Any = optimizer
        self._own: dict[Any, Any] = optimizer.state
        self._resting = RestingState(states)
        self.taken = False

    @property
    def own(self) -> dict[Any, Any]:
        """The optimizer's own dictionary. While states are away, it has what belongs to no parameter."""
        state = self._optimizer.state
        return self._own if state is self._resting else state

    @property
    def has_other(self) -> bool:
        """Whether the optimizer has its own, or one that somebody has loaded."""
        return self._optimizer.state is not self._resting

    def give_back(self) -> None:
        """The optimizer has its own."""
        self._optimizer.state = self.own

    def take(self) -> None:
        """The states are away, if they were taken over."""
        if self.taken:
            self._own, self._optimizer.state = self.own, self._resting


class RestingState(MutableMapping[Any, State]):
    """Answers for states that are away: for schedulers and others who have known the optimizer for longer.

    Each look copies one parameter's state to where it is without tiering, and keeps nothing. Inside of the
    optimizer's own methods, which may change it, all states come to the device at the first look.

    states: is not kept alive. Reading raises Closed when it is gone, and what `States.copy_of` does.
    """

    def __init__(self, states: Answering) -> None:
        self._states = weakref.ref(states)

    def __getitem__(self, key: Any) -> State:
        states = self._alive()
        lent = states.lent_out()
        state: State = states.copy_of(key) if lent is None else lent[key]
        return state

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401 - this is it

    def __contains__(self, key: object) -> bool:
        return key in set(self._alive().keys())  # a list would compare tensors by their values

    def __iter__(self) -> Iterator[Any]:
        states = self._alive()
        lent = states.lent_out()
        return iter(states.keys() if lent is None else lent)

    def __len__(self) -> int:
        return len(self._alive().keys())

    def __setitem__(self, key: Any, state: State) -> None:
        self._changeable()[key] = state

    def __delitem__(self, key: Any) -> None:
        del self._changeable()[key]

    def setdefault(self, key: Any, default: Any = None) -> Any:
        return self._changeable().setdefault(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        return self._changeable().pop(key, *default)

    def __reduce__(self) -> Any:
        """A copy of the optimizer has copies of the states, and is not tiered."""
        return defaultdict, (dict, dict(self))

    def check_step(self) -> None:
        """Raises RuntimeError where a step would change copies, of which nothing stays, and what `check` does."""
        states = self._alive()
        states.check()
        if states.lent_out() is None:
            raise RuntimeError(
                "the states of this optimizer are in a manager's memory, and a step of it would be without them: "
                "step what register_optimizer returned, as in `optimizer = manager.register_optimizer(optimizer)`"
            )

    def _changeable(self) -> dict[Any, Any]:
        lent = self._alive().lent_out()
        if lent is None:
            raise TypeError(
                "the states of this optimizer are in a manager's memory, and here are copies: change them inside "
                "of present() of what register_optimizer returned, or load others by its load_state_dict"
            )
        return lent

    def _alive(self) -> Answering:
        states = self._states()
        if states is None:
            raise Closed("nobody has what register_optimizer returned any more, and so the states are gone")
        return states


def check_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """A hook before the steps of an optimizer that is registered. Raises what `RestingState.check_step` does."""
    if isinstance(optimizer.state, RestingState):
        optimizer.state.check_step()

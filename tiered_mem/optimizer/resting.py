"""What an optimizer has for a `state` while its states are with the manager."""

from __future__ import annotations

import contextlib
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from itertools import chain
from typing import Any, Protocol

import torch

from ..errors import Closed
from .bucket import Bucket
from .layout import State, params_of


class Answering(Protocol):
    """Whoever has the states. See `States`."""

    @property
    def version(self) -> int: ...
    def check(self) -> None: ...
    def keys(self) -> list[Any]: ...
    def copy_of(self, key: Any) -> Any: ...
    def copies_with(self, key: Any) -> dict[Any, State]: ...
    def lent_out(self) -> dict[Any, Any] | None: ...


class StatePlace:
    """The `state` of an optimizer: a dictionary of its own, or what answers for it.

    states: has the states. taken: they were taken over, of which the optimizer knows nothing before. filled: the
    states are in the optimizer's own dictionary. version: another one whenever they may have changed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, states: Answering) -> None:
        self._optimizer: Any = optimizer
        self._own: dict[Any, Any] = optimizer.state
        self._order: list[Any] = list(optimizer.state)
        self._resting = RestingState(states)
        self.taken = False
        self.filled = False
        self.version = 0

    @property
    def own(self) -> dict[Any, Any]:
        """The optimizer's own dictionary. While states are away, it has what belongs to no parameter."""
        state = self._optimizer.state
        return self._own if state is self._resting else state

    @property
    def has_other(self) -> bool:
        """Whether the optimizer has its own, or one that somebody has loaded."""
        return self._optimizer.state is not self._resting

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Inside, the optimizer has its own dictionary for a `state`; and afterwards, if the states are in it."""
        self._optimizer.state = self.own
        self.version += 1
        try:
            yield
        finally:
            if self.taken and not self.filled:
                self._own, self._optimizer.state = self.own, self._resting

    def fill(self, buckets: Iterable[Bucket]) -> None:
        """Inside of `used`: the states of these buckets are in the dictionary."""
        state = self._optimizer.state
        everything = dict(state)
        for bucket in buckets:
            everything |= bucket.states
        state.clear()
        state.update((key, everything[key]) for key in self.in_order(everything))
        self.filled = True

    def leave(self) -> None:
        """Inside of `used`: from now on states are taken out of the dictionary."""
        self._order = list(self._optimizer.state)
        self.filled = False

    def empty_into(self, bucket: Bucket) -> None:
        """Inside of `used`: a bucket takes the states of its parameters."""
        state = self._optimizer.state
        # What is no dictionary is the optimizer's own business.
        bucket.states = {param: state.pop(param) for param in bucket.params if isinstance(state.get(param), dict)}

    def packed(self, states: Mapping[Any, Any]) -> dict[str, Any]:
        """What the optimizer's own state_dict makes of other states than it has."""
        before = self._optimizer.state
        try:
            self._optimizer.state = defaultdict(dict, states)
            packed: dict[str, Any] = self._optimizer.state_dict()
        finally:
            self._optimizer.state = before
        return packed

    def in_order(self, keys: Iterable[Any]) -> list[Any]:
        """As the optimizer has them by itself: somebody may walk over them, and draw a random number for each."""
        left = dict.fromkeys(keys)
        known = (key for key in chain(self._order, params_of(self._optimizer)) if key in left)
        return list(dict.fromkeys(chain(known, left)))


class _ByParameter(Mapping[Any, State], ABC):
    """States by parameter, of which some may not exist: whoever asks for these is not answered by a KeyError."""

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401 - this is it

    def __contains__(self, key: object) -> bool:
        return key in set(self._alive().keys())  # a list would compare tensors by their values

    def __iter__(self) -> Iterator[Any]:
        return iter(self._alive().keys())

    def __len__(self) -> int:
        return len(self._alive().keys())

    @abstractmethod
    def _alive(self) -> Answering: ...


class Copies(_ByParameter):
    """The states as copies in pageable memory."""

    def __init__(self, states: Answering) -> None:
        self._states = states
        self._copied: dict[Any, State] = {}  # of the bucket that was asked for last
        self._version = states.version

    def __getitem__(self, key: Any) -> State:
        if key not in self._copied or self._version != self._states.version:
            self._version = self._states.version
            self._copied = self._states.copies_with(key)
        return self._copied[key]

    def _alive(self) -> Answering:
        return self._states


class RestingState(_ByParameter, MutableMapping[Any, State]):
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

    def __iter__(self) -> Iterator[Any]:
        states = self._alive()
        lent = states.lent_out()
        return iter(states.keys() if lent is None else lent)

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
        self._alive().check()
        self._lent(
            RuntimeError,
            "and a step of it would be without them: step what register_optimizer returned, as in "
            "`optimizer = manager.register_optimizer(optimizer)`",
        )

    def _changeable(self) -> dict[Any, Any]:
        return self._lent(
            TypeError,
            "and here are copies: change them inside of present() of what register_optimizer returned, or load "
            "others by its load_state_dict",
        )

    def _lent(self, error: type[Exception], otherwise: str) -> dict[Any, Any]:
        lent = self._alive().lent_out()
        if lent is None:
            raise error(f"the states of this optimizer are in a manager's memory, {otherwise}")
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

"""One step of an optimizer in several calls, each for some of its parameters."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from ..ground.interrupts import interruptible
from ..ground.wrappers import copied
from .layout import Param, State


class PartialStep:
    """One step of an optimizer, for some of its parameters at a time.

    What the optimizer keeps for a group, or for itself, it counts on in each call as if it were the only one, and
    has counted on once when the step is over. Between calls somebody may give a group other values, for the step to
    come: each call sees those that were there in the beginning, and leaves the others.

    Raises NeedsAll where that cannot be, because calls with different parameters come to different values.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = optimizer.param_groups
        self._values = [_Values(optimizer, _values(group)) for group in self._groups]
        self._own = _Values(optimizer, _plain(vars(optimizer)))
        self._own_tensors = _tensors(vars(optimizer))
        self._tensors = [_tensors(group) for group in self._groups]
        self._group_of = {param: index for index, group in enumerate(self._groups) for param in group["params"]}

    def step(
        self, params: Iterable[Param], states: Mapping[Param, State], away: Iterable[Param]
    ) -> dict[Param, State]:
        """Steps these parameters and returns their states, new ones among them.

        states: those that exist. away: parameters whose state exists, but is not here; they have no gradient.
        """
        chosen: dict[int, list[Param]] = {}
        for param in params:
            if (index := self._group_of.get(param)) is not None:  # who took it out of its group does not step it
                chosen.setdefault(index, []).append(param)
        optimizer = self._optimizer
        groups = {index: self._groups[index] for index in sorted(chosen)}
        whole = {index: group["params"] for index, group in groups.items()}
        rest, present = optimizer.state, _Present(states, frozenset(away))
        present.update((key, value) for key, value in rest.items() if not isinstance(key, torch.Tensor))
        self._own.lend(vars(optimizer), _plain(vars(optimizer)))
        tensors = [*self._own_tensors, *(kept for index in groups for kept in self._tensors[index])]
        for kept in tensors:
            kept.lend()
        at_large = optimizer.param_groups
        try:
            for index, group in groups.items():
                self._values[index].lend(group, _values(group))
                group["params"] = chosen[index]
            optimizer.param_groups = list(groups.values())
            optimizer.state = present
            bare_step(optimizer)()
        finally:
            optimizer.param_groups = at_large
            optimizer.state = rest
            for index, all_of_it in whole.items():
                self._groups[index]["params"] = all_of_it
        rest.update((key, value) for key, value in present.items() if not isinstance(key, torch.Tensor))
        for index, group in groups.items():
            self._values[index].take_back(group, _values(group))
        self._own.take_back(vars(optimizer), _plain(vars(optimizer)))
        # Each of them, for each gives back what is not the step's.
        if not all([kept.take_back() for kept in tensors]):
            raise NeedsAll(self._optimizer, "it has come to different values of a tensor that it keeps")
        return {key: value for key, value in present.items() if isinstance(key, torch.Tensor)}

    def changed(self) -> str | None:
        """The name of a value of a group, or of the optimizer, that somebody has changed since the last call."""
        if self._optimizer.param_groups is not self._groups or len(self._groups) != len(self._values):
            return "param_groups"
        for values, group in zip(self._values, self._groups, strict=True):
            if name := values.changed(_values(group)):
                return name
        if any(kept.changed for each in self._tensors for kept in each):
            return "a tensor of a group"
        return None


class _Values:
    """Values of one group, or of the optimizer: before a step, and after it. They are the same for each call."""

    def __init__(self, optimizer: torch.optim.Optimizer, now: State) -> None:
        self._optimizer = optimizer
        self._before = self._last = now
        self._stepped = False
        self._others: State = {}

    def changed(self, now: State) -> str | None:
        """The name of one that is not what the last call has left."""
        if now.keys() != self._last.keys():
            return str(next(iter(now.keys() ^ self._last.keys())))
        return next((key for key in now if not _same(now[key], self._last[key])), None)

    def lend(self, values: State, now: State) -> None:
        """Has them be as before the step: those that came in it, as a count may, are not there again."""
        self._others = {key: value for key, value in now.items() if not _same(value, self._last.get(key, self))}
        for key in now.keys() - self._before.keys():
            del values[key]
        values.update(self._before)

    def take_back(self, values: State, now: State) -> None:
        """Notes them as they are after it. Others' are there again. Raises NeedsAll where calls differ."""
        if self._stepped:
            for key in self._last.keys() | now.keys():
                if not _same(self._last.get(key), now.get(key)):
                    raise NeedsAll(self._optimizer, f"it has come to different values of {key!r}")
        self._last, self._stepped = now, True
        values.update(self._others)


class _Kept:
    """A tensor that is no parameter's, but the optimizer's own or a group's, and may be changed in place."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._before = tensor._version
        self._last = tensor._version
        self._after: torch.Tensor | None = None
        self._copy = copied(tensor)
        self._others: torch.Tensor | None = None

    @property
    def changed(self) -> bool:
        """Whether somebody has changed it since the last call."""
        return self._tensor._version != self._last

    def lend(self) -> None:
        """Has it be what it was before the step."""
        self._others = copied(self._tensor) if self.changed else None
        if self._tensor._version != self._before:
            self._fill(self._copy)
            self._before = self._tensor._version

    def take_back(self) -> bool:
        """Whether it has been changed as in the call before, if it was. What others have put there is back."""
        if self._tensor._version == self._before:
            agrees = self._after is None
        else:
            before, self._after = self._after, copied(self._tensor)
            agrees = before is None or torch.equal(before, self._after)
        if self._others is not None:
            self._fill(self._others)
        self._last = self._tensor._version
        return agrees

    def _fill(self, value: torch.Tensor) -> None:
        with torch.no_grad():
            self._tensor.copy_(value)


class NeedsAll(ValueError):
    """An optimizer that cannot step some of its parameters at a time."""

    def __init__(self, optimizer: torch.optim.Optimizer, why: str) -> None:
        super().__init__(
            f"{type(optimizer).__name__} needs all its parameters at once, so that its states cannot be moved one "
            f"after another: {why}. Register it without separable=True"
        )


class _Present(defaultdict[Any, State]):
    """The states that are on the device, in place of all of them."""

    def __init__(self, states: Mapping[Param, State], away: frozenset[Param]) -> None:
        super().__init__(dict, states)
        self._away = away

    def __missing__(self, param: Any) -> State:
        if param in self._away:
            raise RuntimeError(
                "the optimizer asked for the state of a parameter without gradient, which is not on the device: "
                "it cannot be tiered"
            )
        return super().__missing__(param)


def bare_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The step without the hooks, which are called for the whole step by whoever has them."""
    step: Any = type(optimizer).step
    own = vars(optimizer).get("step")
    if own is not None and inspect.unwrap(own) is not inspect.unwrap(step):
        return optimizer.step  # somebody's own; a scheduler's that was made before only takes note of the call
    return partial(step.__wrapped__ if getattr(step, "hooked", False) else step, optimizer)


def interruptible_closure(closure: Callable[[], float]) -> Callable[[], float]:
    """The closure, which may run forwards and backwards for as long as these take."""

    @interruptible
    def call() -> float:
        return closure()

    return call


def _values(group: State) -> State:
    return {key: value for key, value in group.items() if key != "params"}


def _plain(attributes: Mapping[str, Any]) -> State:
    return {key: value for key, value in attributes.items() if isinstance(value, int | float)}


def _tensors(values: Mapping[str, Any]) -> list[_Kept]:
    return [_Kept(value) for value in values.values() if isinstance(value, torch.Tensor)]


def _same(one: object, other: object) -> bool:
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and not isinstance(one, torch.Tensor) and bool(one == other)

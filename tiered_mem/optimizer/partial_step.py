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
    has counted on once when the step is over.

    Raises NeedsAll where that cannot be, because calls with different parameters come to different values.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = optimizer.param_groups
        self._before = [_values(group) for group in self._groups]
        self._after: list[State | None] = [None] * len(self._groups)
        self._own = _plain(vars(optimizer))
        self._own_after: State | None = None
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
        whole = {index: self._groups[index]["params"] for index in chosen}
        rest, present = optimizer.state, _Present(states, frozenset(away))
        present.update((key, value) for key, value in rest.items() if not isinstance(key, torch.Tensor))
        _put_back(vars(optimizer), _plain(vars(optimizer)), self._own)
        tensors = [*self._own_tensors, *(kept for index in chosen for kept in self._tensors[index])]
        for kept in tensors:
            kept.restore()
        try:
            for index, some in chosen.items():
                group = self._groups[index]
                _put_back(group, _values(group), self._before[index])
                group["params"] = some
            optimizer.param_groups = [self._groups[index] for index in sorted(chosen)]
            optimizer.state = present
            bare_step(optimizer)()
        finally:
            optimizer.param_groups = self._groups
            optimizer.state = rest
            for index, all_of_it in whole.items():
                self._groups[index]["params"] = all_of_it
        rest.update((key, value) for key, value in present.items() if not isinstance(key, torch.Tensor))
        self._compare(chosen)
        if not all(kept.agrees() for kept in tensors):
            raise NeedsAll(self._optimizer, "it has come to different values of a tensor that it keeps")
        return {key: value for key, value in present.items() if isinstance(key, torch.Tensor)}

    def _compare(self, chosen: Iterable[int]) -> None:
        for index in chosen:
            self._after[index] = self._agreed(self._after[index], _values(self._groups[index]))
        self._own_after = self._agreed(self._own_after, _plain(vars(self._optimizer)))

    def _agreed(self, before: State | None, now: State) -> State:
        for key in () if before is None else before.keys() | now.keys():
            if not _same((before or {}).get(key), now.get(key)):
                raise NeedsAll(self._optimizer, f"it has come to different values of {key!r}")
        return now


class _Kept:
    """A tensor that is no parameter's, but the optimizer's own or a group's, and may be changed in place."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._version = tensor._version
        self._after: torch.Tensor | None = None
        self._copy = copied(tensor)

    def restore(self) -> None:
        """To what it was before the step."""
        if self._tensor._version != self._version:
            with torch.no_grad():
                self._tensor.copy_(self._copy)
            self._version = self._tensor._version

    def agrees(self) -> bool:
        """Whether it has been changed as in the call before, if it was."""
        if self._tensor._version == self._version:
            return self._after is None
        before, self._after = self._after, copied(self._tensor)
        return before is None or torch.equal(before, self._after)


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


def _put_back(values: State, now: State, before: State) -> None:
    """Has values be as they were before the step: those that came in it, as a count may, are not there again."""
    for key in now.keys() - before.keys():
        del values[key]
    values.update(before)


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

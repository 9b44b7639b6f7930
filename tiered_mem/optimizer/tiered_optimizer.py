"""An optimizer whose states are in the pool."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NoReturn, overload

import torch

from .partial_step import Param, State
from .states import States


class TieredOptimizer(torch.optim.Optimizer):
    """A torch.optim.Optimizer that steps another one bucket by bucket, while its states come and go.

    It is made by `TieringManager.register_optimizer`, and is to be used in place of the other. Parameters and
    states have the same values, bit by bit. The groups are the same dictionaries, so that schedulers, hooks,
    closures and gradient scalers work with it.

    `state` gives copies, in which changes are of no effect; so does `state_dict`, in the format of the other
    optimizer. Neither takes device memory.
    """

    def __init__(self, wrapped: torch.optim.Optimizer, states: States, manager: object) -> None:
        # As an optimizer that comes out of a pickle is set up: with its groups, and without a state of its own.
        super().__setstate__({"defaults": wrapped.defaults, "param_groups": wrapped.param_groups})
        self._wrapped = wrapped
        self._states = states
        self._manager = manager  # lives as long as this
        for hooks in _HOOKS:
            # They are called once for a step, and not for each bucket.
            setattr(self, hooks, getattr(wrapped, hooks))
            setattr(wrapped, hooks, OrderedDict())

    @property
    def wrapped(self) -> torch.optim.Optimizer:
        """The optimizer that does the work. Its states are here."""
        return self._wrapped

    @property
    def states(self) -> States:
        """What the manager moves."""
        return self._states

    @property
    def state(self) -> Mapping[Any, Any]:  # type: ignore[override]
        """Copies of the states, by parameter. Each look at a parameter copies what its bucket holds."""
        return _Copies(self._states)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step of the wrapped optimizer. Returns what the closure does.

        Raises InterruptedStep, with the cause, where it ends after some parameters have been stepped.
        """
        self._states.check()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._states.step()
        if hasattr(self._wrapped.step, "_wrapped_by_lr_sched"):
            # A scheduler that was made for the wrapped optimizer looks whether this comes before its own step.
            self._wrapped._opt_called = True  # type: ignore[attr-defined]
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. A step that was prepared for and does not come is one that was left out."""
        self._states.give_up_prefetch()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch. Raises TierFull where there is no room for the new states; the group is not added then."""
        self._wrapped.add_param_group(param_group)
        try:
            self._states.adopt()
        except BaseException:
            self.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        """A snapshot in the wrapped optimizer's format: later steps do not change it.

        What was away is in pageable memory of its own. DTensors are DTensors.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        wrapped, rest = self._wrapped, self._wrapped.state
        try:
            wrapped.state = self._states.snapshot()  # type: ignore[assignment]
            packed = wrapped.state_dict()
        finally:
            wrapped.state = rest
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            packed = _or(post_hook(self, packed), packed)
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what `state_dict` of this or of an unwrapped optimizer gave. It passes the device bucket by bucket.

        Raises what the wrapped optimizer does, with all states as before if the groups do not match.
        """
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = _or(pre_hook(self, state_dict), state_dict)
        saved, groups = state_dict["state"], state_dict["param_groups"]
        names = list(chain.from_iterable(group["params"] for group in groups))

        def load(params: Sequence[Param] | None) -> None:
            known = [param for group in self._wrapped.param_groups for param in group["params"]]
            if params is None:
                some = {key: value for key, value in saved.items() if key not in set(names)}
            else:
                name_of = dict(zip(known, names, strict=True))
                some = {name_of[param]: saved[name_of[param]] for param in params if name_of[param] in saved}
            self._wrapped.load_state_dict({**state_dict, "state": some})

        try:
            self._states.load(load)
        finally:
            self.param_groups = self._wrapped.param_groups
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __repr__(self) -> str:
        return f"Tiered{self._wrapped!r}"

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a tiered optimizer cannot be copied or pickled: its states are in the manager's memory. "
            "Copy or save its state_dict()"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self.__getstate__()


class _Copies(Mapping[Any, Any]):
    """The states by parameter, as copies."""

    def __init__(self, states: States) -> None:
        self._states = states
        self._copied: dict[Any, State] = {}  # of the bucket that was asked for last

    def __getitem__(self, key: Any) -> State:
        if key not in self._copied:
            self._copied = self._states.copies_with(key)
        return self._copied[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._states.keys())

    def __len__(self) -> int:
        return len(self._states.keys())

    def __contains__(self, key: object) -> bool:
        return key in set(self)


_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def _or(result: dict[str, Any] | None, before: dict[str, Any]) -> dict[str, Any]:
    return before if result is None else result

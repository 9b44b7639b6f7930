"""An optimizer whose states are in the pool."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, overload

import torch

from .partial_step import Param, State
from .snapshot import on_cpu
from .states import States


class TieredOptimizer(torch.optim.Optimizer):
    """A torch.optim.Optimizer that steps another one bucket by bucket, while its states come and go.

    It is made by `TieringManager.register_optimizer`, and is to be used in place of the other. Parameters and
    states have the same values, bit by bit. The groups are the same dictionaries, so that schedulers, hooks,
    closures and gradient scalers work with it.

    `state` gives copies, in which changes are of no effect; so does `state_dict`, in the format of the other
    optimizer. These are on the CPU, and take no device memory.
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

        All tensors are on the CPU, in pageable memory of their own. DTensors are DTensors.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        wrapped, rest = self._wrapped, self._wrapped.state
        try:
            wrapped.state = defaultdict(dict, self._states.snapshot())
            copied = [
                value for state in wrapped.state.values() if isinstance(state, dict) for value in state.values()
            ]
            # Whatever else it may keep, such as a learning rate that is a tensor.
            packed: dict[str, Any] = on_cpu(wrapped.state_dict(), set(map(id, copied)))
        finally:
            wrapped.state = rest
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            packed = _or(post_hook(self, packed), packed)
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what `state_dict` of this or of an unwrapped optimizer gave, of which it keeps nothing but copies.

        It passes the device bucket by bucket; where the wrapped optimizer has a load_state_dict of its own, as a
        whole.

        Raises what the wrapped optimizer does, with all states as before if the groups do not match.
        """
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = _or(pre_hook(self, state_dict), state_dict)
        at_once = type(self._wrapped).load_state_dict is not torch.optim.Optimizer.load_state_dict
        try:
            self._states.load(partial(self._load, state_dict, at_once), at_once)
        finally:
            self.param_groups = self._wrapped.param_groups
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _load(self, state_dict: dict[str, Any], everything: bool, params: Sequence[Param]) -> None:
        # A copy: torch would take over what is on the right device already.
        if everything:
            self._wrapped.load_state_dict(on_cpu(state_dict))
            return
        saved = state_dict["state"]
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        known = [param for group in self._wrapped.param_groups for param in group["params"]]
        name_of = dict(zip(known, names, strict=False))  # where there are more of one, loading says so
        chosen = {name_of.get(param) for param in params} | (saved.keys() - names)
        some = {name: on_cpu(state) for name, state in saved.items() if name in chosen}
        self._wrapped.load_state_dict({**state_dict, "state": some})

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
        self._version = states.version

    def __getitem__(self, key: Any) -> State:
        if key not in self._copied or self._version != self._states.version:
            self._version = self._states.version
            self._copied = self._states.copies_with(key)
        return self._copied[key]

    def get(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            return default
        return self[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._states.keys())

    def __len__(self) -> int:
        return len(self._states.keys())

    def __contains__(self, key: object) -> bool:
        return key in set(self)  # a list would compare tensors by their values


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

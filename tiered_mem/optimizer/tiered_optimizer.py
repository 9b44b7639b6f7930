"""An optimizer whose states are in the pool."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, overload

import torch

from ..ground.interrupts import uninterrupted
from .layout import Param, State, on_cpu
from .misuse import StepCheck
from .resting import check_step
from .states import States
from .trial import HOOKS


class TieredOptimizer(torch.optim.Optimizer):
    """A torch.optim.Optimizer that steps another one, for which states come and go bucket by bucket, or at once.

    It is made by `TieringManager.register_optimizer`, and is to be used in place of the other. Parameters and
    states have the same values, bit by bit. The groups are the same dictionaries, so that schedulers, hooks,
    closures and gradient scalers work with it.

    `state` gives copies, in which changes are of no effect; so does `state_dict`, in the format of the other
    optimizer. These are on the CPU, and take no device memory.

    Whatever else the other optimizer has is here, too: `train()`, `eval()`, a rate of its own. Its methods find all
    states on the device if they look for any.
    """

    # A fused optimizer would divide by the scaler's factor itself, which it does not hear of in a step of parts.
    _step_supports_amp_scaling = False

    def __init__(self, wrapped: torch.optim.Optimizer, states: States, manager: object, check: StepCheck) -> None:
        # As an optimizer that comes out of a pickle. What torch adds to the defaults is not for the other one.
        super().__setstate__({"defaults": {}})
        self.defaults = wrapped.defaults
        self._wrapped = wrapped
        self._states = states
        self._check = check
        self._manager = manager  # lives as long as this
        # They are called once for a step, and not for each bucket.
        self._hooks = {name: getattr(wrapped, name) for name in HOOKS}
        try:
            for name, hooks in self._hooks.items():
                setattr(self, name, hooks)
                setattr(wrapped, name, OrderedDict())
            wrapped.register_step_pre_hook(check_step)
        except BaseException:
            self.give_back_hooks()
            raise

    @uninterrupted
    def give_back(self) -> torch.optim.Optimizer:
        """Ends tiering: the wrapped optimizer, with all of its states on the device. This is of no use any more.

        Raises torch.OutOfMemoryError before anything is changed, InterruptedStep and Closed.
        """
        self._states.give_back()
        self.give_back_hooks()
        return self._wrapped

    def give_back_hooks(self) -> None:
        """The wrapped optimizer has its hooks again, as before this was made."""
        for name, hooks in self._hooks.items():
            setattr(self._wrapped, name, hooks)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the wrapped optimizer."""
        return self._wrapped.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._wrapped.param_groups = groups

    @property
    def wrapped(self) -> torch.optim.Optimizer:
        """The optimizer that does the work. Its states are here."""
        return self._wrapped

    @property
    def manager(self) -> object:
        """The manager that has the states."""
        return self._manager

    @property
    def states(self) -> States:
        """What the manager moves."""
        return self._states

    @property
    def at_once(self) -> bool:
        """Whether all states come to the device for a step, which is then the wrapped optimizer's own as it is."""
        return self._states.at_once

    @property
    def step_bytes(self) -> int:
        """The device memory in bytes that states take during a step, and not between steps.

        States that the optimizer has not made yet are known where it could be tried out, and count.
        """
        return self._states.buckets.step_bytes

    @property
    def host_bytes(self) -> int:
        """The host memory in bytes that the states take. With residency="disk", that through which they pass."""
        return self._states.buckets.residences.host_bytes

    @contextlib.contextmanager
    def present(self) -> Iterator[torch.optim.Optimizer]:
        """All states are on the device, in the `state` of the wrapped optimizer, which this gives.

        For what an optimizer can do beside a step: `with optimizer.present() as wrapped: wrapped.eval()`.

        Raises torch.OutOfMemoryError before anything is changed, InterruptedStep and Closed.
        """
        with self._states.present():
            yield self._wrapped

    @property
    def state(self) -> Mapping[Any, Any]:  # type: ignore[override]
        """Copies of the states, by parameter. Each look at a parameter copies what its bucket holds."""
        return _Copies(self._states)

    @overload
    def step(self, closure: None = None, **options: Any) -> None: ...
    @overload
    def step(self, closure: Callable[[], float], **options: Any) -> float: ...
    def step(self, closure: Callable[[], float] | None = None, **options: Any) -> float | None:
        """One step of the wrapped optimizer, which calls the closure as often as it does without this.

        options: what else its step takes. With any the step is made at once. Returns what the closure or the
        optimizer does.

        Raises InterruptedStep, with the cause, where it ends after some parameters have been stepped, and
        ValueError where the parameters are the model's no more.
        """
        self._states.check()
        self._check.look(has_gradients=closure is None)
        loss = None
        if closure is None or options:
            loss = self._states.step(closure, options)
        elif self._states.closure_first:
            with torch.enable_grad():
                loss = closure()
            self._states.step()
        else:
            loss = self._states.step(closure)
        if hasattr(self._wrapped.step, "_wrapped_by_lr_sched"):
            # A scheduler that was made for the wrapped optimizer looks whether this comes before its own step.
            self._wrapped._opt_called = True  # type: ignore[attr-defined]
        return loss

    @uninterrupted
    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """The wrapped optimizer's, with its default. A step that was prepared for and does not come is left out."""
        self._states.drop_prefetch()
        self._wrapped.zero_grad(**({} if set_to_none is None else {"set_to_none": set_to_none}))

    @uninterrupted
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch. Raises TierFull where there is no room for the new states; the group is not added then."""
        self._wrapped.add_param_group(param_group)
        try:
            self._states.adopt()
        except BaseException:
            self.param_groups.pop()
            raise

    @uninterrupted
    def state_dict(self) -> dict[str, Any]:
        """A snapshot in the wrapped optimizer's format: later steps do not change it.

        All tensors are on the CPU, in pageable memory of their own. DTensors are DTensors.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        packed = self._states.snapshot()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            packed = _or(post_hook(self, packed), packed)
        return packed

    @uninterrupted
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what `state_dict` of this or of an unwrapped optimizer gave, of which it keeps nothing but copies.

        It passes the device bucket by bucket; where the wrapped optimizer has a load_state_dict of its own, as a
        whole.

        Raises what the wrapped optimizer does, with all states as before if the groups do not match.
        """
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = _or(pre_hook(self, state_dict), state_dict)
        own = type(self._wrapped).load_state_dict is not torch.optim.Optimizer.load_state_dict
        at_once = own or self._states.at_once
        try:
            self._states.load(partial(self._load, state_dict, at_once), at_once)
        finally:
            self.defaults = self._wrapped.defaults
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

    def __getattr__(self, name: str) -> Any:
        """What the wrapped optimizer has beside torch's interface."""
        wrapped = vars(self).get("_wrapped")
        if wrapped is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(wrapped, name)
        if not (inspect.ismethod(value) and value.__self__ is wrapped):
            return value

        @functools.wraps(value)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._states.lent():
                return value(*args, **kwargs)

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        """What is the wrapped optimizer's is set there."""
        wrapped = vars(self).get("_wrapped")
        ours = name.startswith("_") or name in vars(self) or hasattr(type(self), name)
        if ours or wrapped is None or not hasattr(wrapped, name):
            super().__setattr__(name, value)
        else:
            setattr(wrapped, name, value)

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


def _or(result: dict[str, Any] | None, before: dict[str, Any]) -> dict[str, Any]:
    return before if result is None else result

"""An optimizer whose states are in the pool."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, overload

import torch

from ..device.device import Device
from ..device.torch_private import OPTIMIZER_HOOKS, REPLACED_BY_FSDP, STEP_COUNTED, STEP_SEEN
from ..ground.interrupts import uninterrupted
from .layout import Param, contents, on_cpu, params_of, spread_of
from .resting import Copies, check_step
from .saved_states import SavedStates, StatesWriter, own_tensors
from .states import States

_log = logging.getLogger("tiered_mem.optimizer")

# What those of torch_npu and of apex for Ascend are known by, which lay all parameters, gradients and states end to
# end. Their gradients must not be others, and of their states none can leave by itself.
_COMBINES = ("is_fused_optimizer", "is_npu_fused_optimizer")


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

    def __init__(self, wrapped: torch.optim.Optimizer, states: States, manager: object) -> None:
        # As an optimizer that comes out of a pickle. What torch adds to the defaults is not for the other one.
        super().__setstate__({"defaults": {}})
        self.defaults = wrapped.defaults
        self._wrapped = wrapped
        self._states = states
        self._begun = self._idle = False  # what was said of its steps
        self._manager = manager  # lives as long as this
        # They are called once for a step, and not for each bucket.
        self._hooks = {name: getattr(wrapped, name) for name in OPTIMIZER_HOOKS}
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
    def _step_supports_amp_scaling(self) -> bool:
        """A GradScaler asks for this before each step. A step of parts would not hear of the scaler's factor.

        Raises OverlapRefused where buckets are stepped in backward: the scaler divides gradients after that.
        """
        self._states.stepping.refuse_scaler()
        return False

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
    def overlap(self) -> str | None:
        """What its steps go on beside: "backward", "forward", or None for step() alone."""
        return self._states.stepping.overlap

    @property
    def step_bytes(self) -> int:
        """The device memory in bytes that states take during a step, and not between steps.

        States that the optimizer has not made yet are known where it could be tried out, and count.
        """
        states = self._states
        if not states.away:
            return 0
        return states.pipeline.nbytes if states.at_once else states.pipeline.window_bytes

    @property
    def host_bytes(self) -> int:
        """The host memory in bytes that the states take. With residency="disk", that through which they pass."""
        return self._states.pipeline.residences.host_bytes

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
        return Copies(self._states)

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
        self._states.asked_to_step(self, at_once=closure is not None or bool(options))
        self._look(has_gradients=closure is None)
        loss = None
        if closure is None or options:
            loss = self._states.step(closure, options)
        elif self._states.closure_first:
            with torch.enable_grad():
                loss = closure()
            self._states.step()
        else:
            loss = self._states.step(closure)
        if hasattr(self._wrapped.step, STEP_COUNTED):
            # A scheduler that was made for the wrapped optimizer looks whether this comes before its own step.
            setattr(self._wrapped, STEP_SEEN, True)
        return loss

    @uninterrupted
    def last_backward(self) -> contextlib.AbstractContextManager[None]:
        """To be called before the last backward of a step that has several, or to be entered for it.

        It is of use with overlap="backward", and does nothing otherwise: gradients are final in that backward. Who
        has called it once is to call it in each step.
        """
        self._states.stepping.last_backward()
        return contextlib.nullcontext()

    @uninterrupted
    def finish(self) -> None:
        """Makes what is left of a step whose buckets wait for the next forward, with overlap="forward".

        Raises InterruptedStep and Closed.
        """
        self._states.check()
        self._states.finish()

    @uninterrupted
    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """The wrapped optimizer's, with its default. A step that was prepared for and does not come is left out.

        Raises OverlapRefused where a part of the step has been made in backward.
        """
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
        self._load_by(partial(self._load, state_dict))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the states and the values of the groups into a directory, without a copy of all of them in memory.

        They go from where they rest into safetensors files, one bucket at a time. An earlier save in the directory
        is replaced in the end, and stays if this fails or the process dies. All is on the drive when this returns.
        docs/saved_states.md says what is in the files.

        Args:
            path: The directory. It is made if it is not there.

        Raises:
            TypeError: A state or a group has something that such files cannot hold. Nothing was written.
            ValueError: The optimizer has a `state_dict` of its own, or hooks on it, or its parameters are DTensors.
            OSError: The drive is full, or fails, or another save into the directory is under way.
            RuntimeError: In the middle of a step, or inside of `present()`.
            InterruptedStep, Closed: As for `state_dict`.
        """
        self._check_no_hooks("state_dict_pre", "state_dict_post")
        writer = StatesWriter(self._wrapped, self._states.pipeline.residences.bucket_bytes // 2)
        self._states.save(partial(writer.write, Path(path)))

    @uninterrupted
    def load(self, path: str | os.PathLike[str], *, verify: bool = True) -> None:
        """Takes what `save` wrote, also of an optimizer with other buckets or another residency.

        The states are as after `load_state_dict`. They pass through the host one bucket at a time; those of an
        optimizer that is stepped at once, or has a `load_state_dict` of its own, come to the device as a whole.

        Args:
            path: The directory.
            verify: Read all files and compare their checksums before anything is changed. Without it each tensor is
                compared as it is loaded, so that the files are read once, and a wrong one is found in the middle.

        Raises:
            FileNotFoundError: There are no saved states in the directory.
            CorruptRecord: A file is not as it was written. Nothing was changed, unless `verify` is False.
            ValueError: The states are of another class, of other groups or parameters. Nothing was changed.
            InterruptedStep: From the next call on, after an error in the middle.
            RuntimeError, Closed: As for `load_state_dict`.
        """
        self._check_no_hooks("load_state_dict_pre")
        saved = SavedStates(Path(path))
        saved.check(self._wrapped, data=verify)
        self._load_by(partial(self._load_saved, saved))

    def _check_no_hooks(self, *kinds: str) -> None:
        """Raises ValueError for hooks that would be given a state_dict."""
        for kind in kinds:
            if getattr(self, f"_optimizer_{kind}_hooks"):
                raise ValueError(
                    f"{type(self._wrapped).__name__} has a hook of register_{kind}_hook, and save() and load() "
                    "have no state_dict to give it: use state_dict() and load_state_dict()"
                )

    def _load_by(self, load: Callable[[bool, Sequence[Param]], None]) -> None:
        """load: is given whether all states are loaded at once, and the parameters whose states are wanted."""
        own = type(self._wrapped).load_state_dict is not torch.optim.Optimizer.load_state_dict
        at_once = own or self._states.at_once
        try:
            self._states.load(partial(load, at_once), at_once)
        finally:
            self.defaults = self._wrapped.defaults
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _look(self, *, has_gradients: bool) -> None:
        """Before a step. has_gradients: they are there already, and do not come of a closure.

        Raises ValueError for parameters that are the model's no more. Says once what makes tiering be of no use.
        """
        params, name = params_of(self._wrapped), type(self._wrapped).__name__
        none = bool(params) and all(param.grad is None for param in params)
        idle = none and has_gradients and not self._states.begun
        if idle or not self._begun:
            _check_in_use(params, name)
        if idle and not self._idle:
            self._idle = True
            _log.warning(
                "no parameter of %s has a gradient, and its step changes nothing: was it made for another model, "
                "or before fully_shard put other parameters in their place? Make it afterwards",
                name,
            )
        device = self._states.pipeline.device
        if params and not self._begun and not any(map(device.owns, params)):
            _log.warning(
                "the parameters of %s are on %s, and so are its states, none of which moves: model.to(%r) before "
                "the first step",
                *(name, params[0].device, str(device.torch_device)),
            )
        self._begun = True

    def _load(self, state_dict: dict[str, Any], everything: bool, params: Sequence[Param]) -> None:
        # A copy: torch would take over what is on the right device already.
        if everything:
            self._wrapped.load_state_dict(on_cpu(state_dict))
            return
        saved = state_dict["state"]
        chosen = self._names(params, saved, state_dict["param_groups"])
        some = {name: on_cpu(state) for name, state in saved.items() if name in chosen}
        self._wrapped.load_state_dict({**state_dict, "state": some})

    def _load_saved(self, saved: SavedStates, everything: bool, params: Sequence[Param]) -> None:
        groups = saved.groups()
        chosen = saved.names if everything else self._names(params, saved.names, groups)
        states = {name: saved.state(name) for name in saved.names if name in chosen}
        self._wrapped.load_state_dict({"state": states, "param_groups": groups})
        own_tensors(self._wrapped.state)

    def _names(self, params: Iterable[Param], saved: Iterable[Any], groups: Sequence[dict[str, Any]]) -> set[Any]:
        """What the states of these parameters are named in a state_dict, and those that belong to none."""
        names = [name for group in groups for name in group["params"]]
        # Where there are more of one, loading says so.
        name_of = dict(zip(params_of(self._wrapped), names, strict=False))
        return {name_of.get(param) for param in params} | (set(saved) - set(names))

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


def check_optimizer(optimizer: torch.optim.Optimizer, device: Device) -> None:
    """Raises ValueError, or TypeError, for what cannot be tiered on this device, before anything is changed."""
    name = type(optimizer).__name__
    _check_wraps_none(optimizer, name)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"a torch.optim.Optimizer is needed, and this is a {name}")
    lacking = [each for each in ("param_groups", "state", *OPTIMIZER_HOOKS) if each not in vars(optimizer)]
    if lacking:
        raise ValueError(
            f"{name} has no {lacking[0]!r} of its own, as an optimizer has that called Optimizer.__init__. If it "
            "wraps another optimizer, register that one"
        )
    for option in ("capturable", "differentiable"):
        if any(group.get(option) for group in optimizer.param_groups):
            raise ValueError(
                f"an optimizer with {option}=True cannot be tiered: its states have to stay where they are. "
                f"Make it with {option}=False"
            )
    if any(getattr(optimizer, mark, False) is True for mark in _COMBINES):
        raise ValueError(
            f"{name} lays all its states end to end, where none of them can leave the device: use one of torch's "
            'instead, such as torch.optim.AdamW(..., fused=True) (in transformers optim="adamw_torch_fused")'
        )
    params = params_of(optimizer)
    device.check_some_here(f"the parameters of {name}", params)
    if device.kind != "cpu" and any(param.device.type == "cpu" and spread_of(param) for param in params):
        raise ValueError(
            f"fully_shard(offload_policy=CPUOffloadPolicy()) keeps the states of {name} on the cpu, and "
            "register_optimizer would move the same: leave out one of the two"
        )
    _check_in_use(params, name)


def _check_in_use(params: Sequence[Param], name: str) -> None:
    """Raises ValueError for parameters in whose place FSDP2 has put others, as that of torch 2.13 lets see."""
    gone = sum(hasattr(param, REPLACED_BY_FSDP) and spread_of(param) is None for param in params)
    if gone:
        raise ValueError(
            f"{gone} of {len(params)} parameters of {name} are not the model's any more, as fully_shard put others "
            "in their place: make the optimizer after it, as in `fully_shard(model); optimizer = "
            f"manager.register_optimizer({name}(model.parameters()))`"
        )


def _check_wraps_none(optimizer: object, name: str) -> None:
    """Raises ValueError for a wrapper: its states are another optimizer's, which is the one to register."""
    for attribute, value in getattr(optimizer, "__dict__", {}).items():
        if any(isinstance(each, torch.optim.Optimizer) for each in contents(value)):
            inner = f"optimizer.{attribute}"
            raise ValueError(
                f"{name} wraps another optimizer, which has the states: register {inner} and put what comes back "
                f"in its place, as in `{inner} = manager.register_optimizer({inner})`"
            )


def _or(result: dict[str, Any] | None, before: dict[str, Any]) -> dict[str, Any]:
    return before if result is None else result

"""What copy, pickle and TorchScript take of modules that have hooks of ours: all but these."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

from ..device.torch_private import MODULE_HOOK_FLAGS, MODULE_HOOKS
from .saved_hooks import is_method_of

M = TypeVar("M", bound=torch.nn.Module)


class HookOwner:
    """Our hooks on modules are methods of one of these."""

    def __deepcopy__(self, memo: dict[int, Any]) -> HookOwner:
        return self  # it follows nobody's copy: a module may be copied by code of its own, with the hooks


def keep_apart(module: torch.nn.Module) -> None:
    """Copies of the module are free of our hooks from now on."""
    for name, answer in _ANSWERS.items():
        if name not in vars(module):
            vars(module)[name] = partial(answer, weakref.ref(module))


def end_apart(module: torch.nn.Module) -> None:
    """Nothing of ours is left on the module, if it has none of our hooks any more."""
    if not has_hooks(module):
        for name, answer in _ANSWERS.items():
            if getattr(vars(module).get(name), "func", None) is answer:
                del vars(module)[name]


def has_hooks(module: torch.nn.Module, owner: type[HookOwner] = HookOwner) -> bool:
    """Whether the module has hooks that are methods of such an owner."""
    return any(is_method_of(hook, owner) for name in MODULE_HOOKS for hook in vars(module)[name].values())


def _reduced(reference: weakref.ref[torch.nn.Module], protocol: Any) -> Any:
    module = _alive(reference)
    whole = type(module).__reduce_ex__(module, protocol)
    if not isinstance(whole, tuple) or len(whole) < 3 or not isinstance(whole[2], dict):
        return whole
    return (*whole[:2], _without_ours(module, whole[2]), *whole[3:])


def _scriptable(reference: weakref.ref[torch.nn.Module]) -> torch.nn.Module:
    return _without_hooks(_alive(reference))


# Python's name for what copy and pickle ask a module for, and torch's for what torch.jit.script does.
_ANSWERS: dict[str, Callable[..., Any]] = {"__reduce_ex__": _reduced, "__prepare_scriptable__": _scriptable}


def _without_hooks(module: M) -> M:
    """The module, if neither it nor a module inside has hooks of ours, or one without them that shares all else."""
    inside = {name: child and _without_hooks(child) for name, child in module._modules.items()}
    if not has_hooks(module) and all(child is module._modules[name] for name, child in inside.items()):
        return module
    twin = type(module).__new__(type(module))
    vars(twin).update(_without_ours(module, vars(module)), _modules=inside)
    return twin


def _without_ours(module: torch.nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """The module's attributes without what is ours."""
    ours = {
        key for name in MODULE_HOOKS for key, hook in vars(module)[name].items() if is_method_of(hook, HookOwner)
    }
    kept = {name: value for name, value in state.items() if name not in _ANSWERS}
    for name in {*MODULE_HOOKS, *MODULE_HOOK_FLAGS} & kept.keys():
        kept[name] = OrderedDict((key, value) for key, value in state[name].items() if key not in ours)
    return kept


def _alive(reference: weakref.ref[M]) -> M:
    module = reference()
    if module is None:
        raise ReferenceError("the module that this was made for does not live any more")
    return module

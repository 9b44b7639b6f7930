"""torch.optim's optimizers, tiered: `tiered_mem.optim.AdamW` in place of `torch.optim.AdamW`.

For code that names an optimizer and makes it elsewhere, such as a configuration file. Their states are in the
default manager's pool (see `tiered_mem.configure`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container
from typing import Any, cast

import torch
from torch.optim import Optimizer

from .configuration import default_manager
from .manager import TieringManager

# Those of register_optimizer, which each class takes beside the optimizer's own.
_ARGUMENTS = ("bucket_bytes", "residency", "separable", "overlap", "keep_gradients")
# Where an optimizer keeps those while it is made.
_HANDED_ON = "_of_register_optimizer"


def tiered(
    optimizer_class: type[Optimizer], *, manager: Callable[[], TieringManager] = default_manager
) -> type[Optimizer]:
    """A class whose making returns a TieredOptimizer over an optimizer of the class that is given.

    It takes the arguments of that class, and of `register_optimizer` all that have a default.
    It is a subclass of that class for those who ask for one. What it returns is no instance of it.

    What is derived from it keeps an `__init__` and a `step` of its own. Its making returns a TieredOptimizer over
    an instance of it, which these arguments may also reach by `super().__init__()`.

    manager: gives the manager, when an optimizer is made.

    Raises TypeError for what is no class of optimizers, or is made by this.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise TypeError(f"a subclass of torch.optim.Optimizer is needed, not {optimizer_class!r}")
    if optimizer_class.__new__ is not Optimizer.__new__:
        raise TypeError(f"{optimizer_class.__name__} has a __new__ of its own, or is tiered already")

    def make(kind: type[Optimizer], *arguments: Any, **options: Any) -> Optimizer:
        if kind is made:
            ours = _ours(options)
            return manager().register_optimizer(optimizer_class(*arguments, **options), **ours)
        ours = _ours(options, but=inspect.signature(kind.__init__).parameters)
        optimizer: Any = object.__new__(kind)
        optimizer.__init__(*arguments, **options)
        return manager().register_optimizer(optimizer, **vars(optimizer).pop(_HANDED_ON, {}) | ours)

    def initialise(optimizer: Optimizer, *arguments: Any, **options: Any) -> None:
        vars(optimizer)[_HANDED_ON] = _ours(options)
        optimizer_class.__init__(optimizer, *arguments, **options)

    def sign(kind: Any, **options: Any) -> None:
        super(made, kind).__init_subclass__(**options)
        if "__init__" in vars(kind):
            kind.__signature__ = _signature(kind)

    made: Any = type(
        optimizer_class.__name__,
        (optimizer_class,),
        {
            "__new__": make,
            "__init__": initialise,
            "__init_subclass__": sign,
            "__module__": __name__,
            "__doc__": f"{optimizer_class.__name__}, with its states in the default manager's pool.",
            "__signature__": _signature(optimizer_class),
        },
    )
    return cast(type[Optimizer], made)


def _ours(options: dict[str, Any], but: Container[str] = ()) -> dict[str, Any]:
    """Takes the arguments of register_optimizer out of others. but: those that stay there."""
    return {name: options.pop(name) for name in _ARGUMENTS if name in options and name not in but}


def _signature(optimizer_class: type[Optimizer]) -> inspect.Signature:
    """What may be written in a configuration file: those who read one ask for it."""
    wrapped = inspect.signature(optimizer_class.__init__)
    registering = inspect.signature(TieringManager.register_optimizer).parameters
    _, *parameters = wrapped.parameters.values()
    at = len(parameters) - any(each.kind is each.VAR_KEYWORD for each in parameters)
    parameters[at:at] = [registering[name] for name in _ARGUMENTS if name not in wrapped.parameters]
    return wrapped.replace(parameters=parameters, return_annotation=inspect.Signature.empty)


_CLASSES = {
    name: tiered(found)
    for name, found in vars(torch.optim).items()
    if isinstance(found, type) and issubclass(found, Optimizer) and found is not Optimizer
}


def __getattr__(name: str) -> Any:
    if name not in _CLASSES:
        raise AttributeError(f"torch.optim has no optimizer {name!r}")
    return _CLASSES[name]


def __dir__() -> list[str]:
    return sorted({"tiered", *_CLASSES})

"""Torch's hooks for saved tensors: whose they are, and how they look to torch.compile."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from ..device.torch_private import CHECKPOINT_HOOKS, DYNAMO, compile_never, compile_not_by_itself, top_saving_hooks

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

# Other offloaders by what makes their hooks, and how a user switches them on. The innermost hooks have the tensors.
_RIVALS = {
    "save_on_cpu": "torch.autograd.graph.save_on_cpu()",
    "OffloadActivations": "TRL's activation_offloading=True",
    "async_save_on_cpu": "async_save_on_cpu()",
}
COMPILE_LAYERS = (
    "tiered_mem moves tensors here: compile the layers, not the model around them, or leave out fullgraph"
)


def saving_hook() -> Callable[..., Any] | None:
    """What this thread's saved tensors go to now. Autograd knows: the innermost hooks win."""
    hooks = top_saving_hooks(False)
    return None if hooks is None else hooks[0]


def refuse_rivals() -> None:
    """Raises ValueError where another offloader is about to have what is saved."""
    rival = getattr(saving_hook(), "__qualname__", "").partition(".")[0]
    if rival in _RIVALS:
        raise ValueError(
            f"{_RIVALS[rival]} and tiered_mem's attach() or offload_context() would both move the same tensors: "
            "leave out one of the two"
        )


def owner_of(function: object) -> object:
    """Whose method a function is, by itself or as `untraced` returned it. None if it is nobody's."""
    return getattr(getattr(function, "__wrapped__", function), "__self__", None)


def is_method_of(function: object, kind: type) -> bool:
    """Whether a function is a method of an object of this kind."""
    return isinstance(owner_of(function), kind)


def is_checkpoint() -> bool:
    """Whether what is saved now goes to torch.utils.checkpoint, which throws it away."""
    return getattr(saving_hook(), "__qualname__", "").startswith(CHECKPOINT_HOOKS)


def only_inlined(function: F) -> F:
    """The function, which torch.compile traces inside of what it compiles, and never compiles by itself."""
    compile_not_by_itself(function)
    return function


def never_traced(function: F) -> F:
    """The function, which torch.compile runs as it is, with all that it calls.

    It is `untraced` without a function around it: that would call three more of Python's each time.
    """
    compile_never(function, COMPILE_LAYERS)
    return function


@only_inlined
def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which torch.compile then runs as it is and does not trace."""
    if DYNAMO not in sys.modules:
        return function
    kept_out: Callable[P, R] = torch.compiler.disable(  # type: ignore[no-untyped-call]
        function, reason=COMPILE_LAYERS
    )
    return kept_out


def untraced_later(function: Callable[P, R]) -> Callable[P, R]:
    """As `untraced`, for what may be called before torch.compile is imported, and traced then."""
    kept_out: list[Callable[P, R]] = []

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not kept_out and DYNAMO in sys.modules:
            if torch.compiler.is_compiling():
                sys.modules[DYNAMO].graph_break(msg=COMPILE_LAYERS)
            kept_out.append(untraced(function))
        return (kept_out[0] if kept_out else function)(*args, **kwargs)

    return only_inlined(call)

"""Torch's hooks for saved tensors: whose they are, and how they look to torch.compile."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

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
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if hooks is None else hooks[0]


def refuse_rivals() -> None:
    """Raises ValueError where another offloader is about to have what is saved."""
    rival = getattr(saving_hook(), "__qualname__", "").partition(".")[0]
    if rival in _RIVALS:
        raise ValueError(
            f"{_RIVALS[rival]} and tiered_mem's attach() or offload_context() would both move the same tensors: "
            "leave out one of the two"
        )


def is_method_of(function: object, kind: type) -> bool:
    """Whether a function is a method of an object of this kind, by itself or as `untraced` returned it."""
    return isinstance(getattr(getattr(function, "__wrapped__", function), "__self__", None), kind)


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which torch.compile then runs as it is and does not trace."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and to import it takes seconds
        return function
    kept_out: Callable[P, R] = torch.compiler.disable(  # type: ignore[no-untyped-call]
        function, reason=COMPILE_LAYERS
    )
    return kept_out

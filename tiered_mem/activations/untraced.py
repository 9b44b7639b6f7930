"""Functions that torch.compile runs as they are, as it must not trace what moves tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from ..device.torch_private import DYNAMO, compile_never, compile_not_by_itself

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

COMPILE_LAYERS = (
    "tiered_mem moves tensors here: compile the layers, not the model around them, or leave out fullgraph"
)


def never_traced(function: F) -> F:
    """The function, which torch.compile runs as it is, with all that it calls.

    It is `untraced` without a function around it: that would call three more of Python's each time.
    """
    compile_never(function, COMPILE_LAYERS)
    return function


def only_inlined(function: F) -> F:
    """The function, which torch.compile traces inside of what it compiles, and never compiles by itself."""
    compile_not_by_itself(function)
    return function


@only_inlined
def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which torch.compile then runs as it is and does not trace."""
    if DYNAMO not in sys.modules:  # nothing is compiled, and to import it takes seconds
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

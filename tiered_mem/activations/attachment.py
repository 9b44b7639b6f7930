"""Attached models: their forward enters its offload context by itself."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Protocol

import torch

from .reduced import reduced
from .saved_hooks import COMPILE_LAYERS


class Attachment:
    """What TieringManager.attach() returns. Keeps no model alive. A context manager, which ends with remove()."""

    def __init__(self, model: torch.nn.Module, make_context: Callable[[torch.nn.Module], Context]) -> None:
        self._forward = AttachedForward(model, make_context)
        self._model = weakref.ref(model)
        vars(model)["forward"] = self._forward
        vars(model)["__reduce_ex__"] = self._forward.reduced

    def remove(self) -> None:
        """The model runs as before. What it saved until now keeps moving. Idempotent."""
        self._forward.active = False
        model = self._model()
        # Whoever has wrapped the forward since keeps ours in there, which does nothing any more.
        if model is not None and vars(model).get("forward") is self._forward:
            self._forward.give_back(model)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


class AttachedForward:
    """A model's forward in an offload context: in training, with gradients on, and not inside of itself.

    It takes the place of the model's method. Hooks of the model would not do: torch calls none of them when Ctrl-C
    ends a forward, and whatever is saved after that would be taken for this forward's.
    """

    def __init__(self, model: torch.nn.Module, make_context: Callable[[torch.nn.Module], Context]) -> None:
        self.active = True
        self.__name__ = "forward"
        self.__doc__ = model.forward.__doc__
        self.__signature__ = inspect.signature(model.forward)
        self._model = weakref.ref(model)
        self._replaced: Callable[..., Any] | None = vars(model).get("forward")  # where somebody was here before
        self._make_context = make_context
        self._of_thread = threading.local()
        self._of_thread.context = make_context(model)  # what is wrong with it shows now

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._alive()
        forward = self._replaced or partial(type(model).forward, model)
        if not (self.active and model.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        context: Context | None = getattr(self._of_thread, "context", None)
        if context is None:
            context = self._of_thread.context = self._make_context(model)
        if not context.free:
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break(msg=COMPILE_LAYERS)
        with context:
            return forward(*args, **kwargs)

    def reduced(self, protocol: Any) -> Any:
        """What copy and pickle take of the model: a copy is not attached."""
        return reduced(self._alive(), protocol, self._take_out)

    def give_back(self, model: torch.nn.Module) -> None:
        """The model has the forward again that it had before."""
        del vars(model)["__reduce_ex__"], vars(model)["forward"]
        if self._replaced is not None:
            vars(model)["forward"] = self._replaced

    def _take_out(self, state: dict[str, Any]) -> None:
        state.pop("forward", None)
        if self._replaced is not None:
            state["forward"] = self._replaced

    def _alive(self) -> torch.nn.Module:
        model = self._model()
        if model is None:
            raise ReferenceError("the model whose forward this is does not live any more")
        return model


def is_attached(model: torch.nn.Module) -> bool:
    """Whether the model's forward is that of an attachment which was not removed."""
    forward = vars(model).get("forward")
    return isinstance(forward, AttachedForward) and forward.active


class Context(Protocol):
    """An offload context. free: whether it can be entered."""

    @property
    def free(self) -> bool: ...
    def __enter__(self) -> object: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

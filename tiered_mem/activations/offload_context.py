"""The offload context: wraps a forward whose layers are known as modules."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from threading import get_ident
from types import TracebackType

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from ..ground.interrupts import uninterrupted
from .activations import Activations
from .copies import HookOwner, end_apart, keep_apart
from .forward_pass import ForwardPass
from .layer_calls import LayerCalls
from .movable import Movable
from .saved_hooks import untraced


class OffloadContext(contextlib.ContextDecorator):
    """Wraps a forward: what its layers save for backward is the policy's to move.

    Each call of a layer counts, in the order in which they come: layers may be called in any order, several times,
    or not at all. A layer inside another one interrupts it. One context serves many forwards, one after the other;
    their graphs may be in flight together and run their backward in any order. Also a decorator for a function that
    runs the forward. Only the thread that enters it is concerned: others may run the same layers meanwhile. Made by
    TieringManager.offload_context().

    Args:
        activations: The manager's.
        layers: The modules whose calls count.
        movable: Says which saved tensors may move.
        whole: The layers are those of the model that is run. What is saved before one of them is its own too.
    """

    def __init__(
        self, activations: Activations, layers: Sequence[torch.nn.Module], movable: Movable, *, whole: bool
    ) -> None:
        self._activations = activations
        self._layers = layers
        self._movable = movable
        self._whole = whole
        self._expected = len(layers)
        self._entered: _Entered | None = None

    @uninterrupted
    def __enter__(self) -> OffloadContext:
        if self._entered is not None:
            raise RuntimeError("this offload context is entered already; make a second one to nest forwards")
        forward = ForwardPass(self._activations, self._movable, self._expected, claims_strays=self._whole)
        self._entered = _Entered(forward, self._layers)
        return self

    @uninterrupted
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entered, self._entered = self._entered, None
        if entered is not None:
            layers = entered.leave(early=error is not None)
            if error is None and layers > 0:
                # How many calls there are shows only afterwards: the next forward is expected to be like this one.
                self._expected = layers


class _Entered(HookOwner):
    """What there is only while a forward runs: hooks on the layers, for this thread.

    Raises what torch does where saved-tensor hooks are not allowed, as in torch.func.grad, and ValueError inside of
    another offloader. Nothing is left then. One inside of the layers shows only when nothing has come.
    """

    def __init__(self, forward: ForwardPass, layers: Sequence[torch.nn.Module]) -> None:
        self._calls = LayerCalls(forward)
        self._thread = get_ident()
        self._marks: list[RemovableHandle] = []
        self._layers = list(dict.fromkeys(layers))
        try:
            self._hooks: saved_tensors_hooks = forward.hooks()
            self._hooks.__enter__()
        except BaseException:
            forward.end(early=True)
            raise
        begin, end = untraced(self._begin), untraced(self._end)
        for layer in self._layers:
            keep_apart(layer)
            self._marks.append(layer.register_forward_pre_hook(begin, with_kwargs=True))
            self._marks.append(layer.register_forward_hook(end, always_call=True))

    def leave(self, *, early: bool) -> int:
        """Takes the hooks away. Returns how many layers ran. early: an exception ended the forward."""
        self._hooks.__exit__()
        for mark in self._marks:
            mark.remove()
        for layer in self._layers:
            end_apart(layer)
        self._calls.forward.end(early=early)
        return self._calls.forward.layers

    # torch adds a hook before it notes that the hook takes the named inputs as well: another thread may see the one
    # without the other.
    @uninterrupted
    def _begin(
        self, module: torch.nn.Module, inputs: tuple[object, ...], named: dict[str, object] | None = None
    ) -> None:
        if get_ident() == self._thread:
            self._calls.begin(module, (*inputs, *(named or {}).values()))

    @uninterrupted
    def _end(self, module: torch.nn.Module, inputs: object, output: object) -> None:
        if get_ident() == self._thread:
            self._calls.end(module, output)

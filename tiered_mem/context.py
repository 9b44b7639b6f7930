"""The offload context: wraps a forward whose layers are known as modules."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from .forward_pass import ForwardPass, untraced
from .movable import Movable

if TYPE_CHECKING:
    from .activations import Activations


class OffloadContext(contextlib.ContextDecorator):
    """Wraps a forward: what its layers save for backward is the policy's to move.

    Each call of a layer counts, in the order in which they come: layers may be called in any order, several times,
    or not at all. A layer inside another one interrupts it. One context serves many forwards, one after the other;
    their graphs may be in flight together and run their backward in any order. Also a decorator for a function that
    runs the forward. Made by TieringManager.offload_context().
    """

    def __init__(self, activations: Activations, layers: Sequence[torch.nn.Module], movable: Movable) -> None:
        self._activations = activations
        self._layers = layers
        self._movable = movable
        self._expected = len(layers)
        self._entered: _Entered | None = None

    def __enter__(self) -> OffloadContext:
        if self._entered is not None:
            raise RuntimeError("this offload context is entered already; make a second one to nest forwards")
        self._entered = _Entered(ForwardPass(self._activations, self._movable, self._expected), self._layers)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entered, self._entered = self._entered, None
        if entered is not None:
            layers = entered.leave()
            if error is None and layers > 0:
                # How many calls there are shows only afterwards: the next forward is expected to be like this one.
                self._expected = layers


class _Entered:
    """What there is only while a forward runs: hooks on the layers, and which of them are running."""

    def __init__(self, forward: ForwardPass, layers: Sequence[torch.nn.Module]) -> None:
        self._forward = forward
        self._running: list[tuple[torch.nn.Module, int]] = []
        begin, end = untraced(self._begin), untraced(self._end)
        self._marks: list[RemovableHandle] = []
        for layer in dict.fromkeys(layers):
            self._marks.append(layer.register_forward_pre_hook(begin, with_kwargs=True))
            self._marks.append(layer.register_forward_hook(end, always_call=True))
        self._hooks: saved_tensors_hooks = forward.hooks()
        self._hooks.__enter__()

    def leave(self) -> int:
        """Takes the hooks away. Returns how many layers ran."""
        self._hooks.__exit__()
        for mark in self._marks:
            mark.remove()
        self._forward.end()
        return self._forward.layers

    def _begin(self, module: torch.nn.Module, inputs: tuple[object, ...], named: dict[str, object]) -> None:
        self._running.append((module, self._forward.begin_layer((*inputs, *named.values()))))

    def _end(self, module: torch.nn.Module, inputs: object, output: object) -> None:
        if not self._running or self._running[-1][0] is not module:
            return  # somebody else's hook raised before this layer began
        self._forward.end_layer(self._running.pop()[1])
        self._forward.resume_layer(self._running[-1][1] if self._running else None)

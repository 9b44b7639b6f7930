"""The offload context for loops that run the layers themselves: entered once for each layer."""

from __future__ import annotations

import contextlib
from types import TracebackType

import torch
from torch.autograd.graph import saved_tensors_hooks

from ..ground.interrupts import uninterrupted
from .driver import Activations
from .hooks import ForwardPass
from .movable import Movable


class LayerContext(contextlib.ContextDecorator):
    """Entered once for each layer, in Transformer Engine's manner:

        for layer in layers:
            with offload:
                x = layer(x)
            x = offload.sync(x)

    Entering it while gradients are off does nothing and counts nothing. Made by TieringManager.layer_context().
    """

    def __init__(self, sequence: LayerSequence) -> None:
        self._sequence = sequence
        self._entered = False
        self._hooks: saved_tensors_hooks | None = None
        self._last: tuple[ForwardPass, int] | None = None
        self._block = -1

    @property
    def forward(self) -> ForwardPass | None:
        """The forward of the layer that was entered last. None where gradients were off."""
        return None if self._last is None else self._last[0]

    def block(self, number: int) -> None:
        """The layer to be entered next has this number. One that is not above the last one begins a new forward."""
        if torch.is_grad_enabled():
            if number <= self._block:
                self.restart()
            self._block = number

    @uninterrupted
    def __enter__(self) -> LayerContext:
        if self._entered:
            raise RuntimeError("this offload context is entered already: leave it before the next layer")
        self._last = None
        if torch.is_grad_enabled():
            try:
                layer = self._sequence.begin()
                hooks = self._sequence.forward.hooks()
                hooks.__enter__()  # torch.func.grad, for one, does not allow it
            except BaseException:
                self._sequence.restart()
                raise
            self._last = self._sequence.forward, layer
            self._hooks = hooks
        self._entered = True
        return self

    @uninterrupted
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        hooks, self._hooks = self._hooks, None
        self._entered = False
        if hooks is not None:
            hooks.__exit__()
            if error is None:
                self._sequence.end()
            else:
                self._sequence.restart()

    def sync(self, output: torch.Tensor) -> torch.Tensor:
        """Tells when the layer's backward begins: that is when the gradient of this output of it arrives.

        Returns the output. It may be left out; backward then begins with the first tensor that it asks for.
        Raises RuntimeError before the first layer.
        """
        if self._last is None:
            if torch.is_grad_enabled() and output.requires_grad:
                raise RuntimeError("sync comes after the layer: enter the offload context first")
            return output
        forward, layer = self._last
        if output.requires_grad and output.grad_fn is not None:
            output.grad_fn.register_prehook(lambda gradients: forward.begin_backward(layer))
        return output

    def restart(self) -> None:
        """The next layer is the first of a new forward. An exception inside the context does the same."""
        self._sequence.restart()


class LayerSequence:
    """Numbers the layers of one forward after the other: after `num_layers` of them the next is the first again.

    variable_depth: a forward may end early. Once nothing that it saved is alive, the next layer is the first again.
        Without it the numbers follow the order of the calls alone, as a schedule for pipelines needs it.
    """

    def __init__(
        self, activations: Activations, movable: Movable, num_layers: int, *, variable_depth: bool
    ) -> None:
        self._activations = activations
        self._movable = movable
        self._num_layers = num_layers
        self._variable_depth = variable_depth
        self._forward: ForwardPass | None = None
        self._open: int | None = None
        self._complete = False

    @property
    def forward(self) -> ForwardPass:
        """The forward that runs, or ran last. Raises RuntimeError before the first."""
        if self._forward is None:
            raise RuntimeError("no layer has begun yet")
        return self._forward

    def keys(self) -> list[int]:
        """The blocks that this forward has saved so far."""
        return [] if self._forward is None else [key for layer in self._forward.keys for key in layer]

    @property
    def layer(self) -> int | None:
        """The layer that runs."""
        return self._open

    def begin(self) -> int:
        """The next layer begins. Returns its number."""
        if self._forward is not None and (self._complete or self._gone()):
            self.restart()
        if self._forward is None:
            self._forward = ForwardPass(self._activations, self._movable, self._num_layers)
        self._open = self._forward.begin_layer()
        return self._open

    def end(self) -> None:
        """The layer that runs ends."""
        if self._open is None:
            return
        forward, layer = self.forward, self._open
        self._open = None
        try:
            forward.end_layer(layer)
        finally:
            if forward.layers == self._num_layers:
                self._complete = True
                forward.end()

    @uninterrupted
    def restart(self) -> None:
        """The next layer is the first of a new forward. What this one saved stays for its backward."""
        forward, self._forward = self._forward, None
        layer, self._open = self._open, None
        complete, self._complete = self._complete, False
        if forward is None:
            return
        try:
            if layer is not None:
                forward.end_layer(layer)
        finally:
            if not complete:
                forward.end(early=True)

    def _gone(self) -> bool:
        keys = self.keys()
        return self._variable_depth and bool(keys) and not self._activations.any_alive(keys)

"""The forwards of an attached model, found by the calls of its modules."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from types import FrameType

import torch
from torch.autograd.graph import saved_tensors_hooks

from ..device.torch_private import (
    MODULE_CALL,
    current_backward,
    forward_mode_level,
    innermost_transform,
    is_fx_tracing,
    is_jit_tracing,
    saving_hooks_allowed,
)
from .activations import Activations
from .forward_pass import ForwardPass, drop_ended_hooks
from .layer_calls import LayerCalls
from .movable import Movable
from .saved_hooks import is_checkpoint


class ModelForwards:
    """One after the other, on one thread.

    A forward is one call of the model, or of a part of it that has layers inside, whichever is outermost. Layers
    that are called in another way, as by a method of the model's, make a forward too: a loose one. It ends with as
    many calls as there are layers, after an exception, where its backward begins, and before a layer begins if that
    is its first one, or if nothing of it is alive any more. What is saved between its layers is not its own.

    num_layers: how many layers there are. A forward is expected to have as many calls of them as the last one.
    """

    def __init__(self, activations: Activations, movable: Movable, num_layers: int) -> None:
        self._activations = activations
        self._movable = movable
        self._num_layers = self._expected = num_layers
        self._calls: LayerCalls[ForwardPass] | None = None  # of the forward that is not known to have ended
        self._loose = False
        self._hooks: saved_tensors_hooks | None = None
        self._call: weakref.ref[torch.nn.Module] | None = None  # what runs: the outermost part, or a loose layer
        self._deeper = 0  # calls of the outermost part inside of itself
        self._first: weakref.ref[torch.nn.Module] | None = None

    @property
    def under_way(self) -> bool:
        """Whether a call is, the end of which matters."""
        return self._call is not None

    def begin_around(self, module: torch.nn.Module) -> None:
        """A part of the model begins that has layers inside."""
        if self._call is not None:
            if self._goes_on(self._call, module):
                self._deeper += self._call() is module
                return
            self.end(early=True)
        self.end()
        if self._may_begin():
            self._begin(module, loose=False)

    def end_around(self, module: torch.nn.Module) -> None:
        """It has ended."""
        if self._loose or self._call is None or self._call() is not module:
            return
        if self._deeper:
            self._deeper -= 1
        else:
            self.end()

    def begin_layer(self, module: torch.nn.Module, inputs: Iterable[object]) -> bool:
        """A layer begins. Whether it is part of a forward. Raises ValueError inside of another offloader."""
        again = self._first is not None and self._first() is module
        if again and self._call is not None and not self._goes_on(self._call, module):
            self.end(early=True)
        if self._call is None:
            if not self._may_begin() or is_checkpoint():
                return False
            self._end_before(again)
            self._begin(module, loose=True)
        if self._calls is None:
            return False
        if self._first is None:
            self._first = weakref.ref(module)
        try:
            self._calls.begin(module, inputs)
        except BaseException:
            if self._loose:
                self.end(early=True)
            raise
        return True

    def end_layer(self, module: torch.nn.Module, output: object) -> None:
        """A layer has ended. Without an output it has failed."""
        if self._calls is None:
            return
        self._calls.end(module, output)
        if self._loose and not self._calls.running:
            self._leave()
            if output is None or 1 < self._num_layers <= self._calls.forward.layers:
                self.end(early=output is None)

    def end(self, *, early: bool = False) -> None:
        """No more is part of the forward that is open, if there is one. early: it was broken off."""
        calls = self._calls
        if calls is None:
            return
        self._leave()
        self._calls = self._first = None
        if not early and calls.forward.layers:
            # How many calls there are shows only afterwards: the next forward is expected to be like this one.
            self._expected = calls.forward.layers
        calls.forward.end(early=early)

    def _end_before(self, again: bool) -> None:
        """A loose forward may have ended since its last layer. again: its first layer is the next."""
        if self._calls is not None:
            keys = [key for layer in self._calls.forward.keys for key in layer]
            gone = bool(keys) and not self._activations.any_alive(keys)
            if self._calls.forward.ended or gone or (again and self._num_layers > 1):
                self.end(early=gone)

    def _begin(self, module: torch.nn.Module, *, loose: bool) -> None:
        """A call begins that a forward lies in, or a loose layer that goes on with one."""
        drop_ended_hooks()
        if self._calls is None:
            forward = ForwardPass(
                self._activations, self._movable, self._expected, claims_strays=not loose, open_ended=loose
            )
            self._calls = LayerCalls(forward)
            self._loose, self._deeper = loose, 0
        try:
            hooks = self._calls.forward.hooks()
            hooks.__enter__()
        except BaseException:
            self.end(early=True)
            raise
        self._hooks, self._call = hooks, weakref.ref(module)

    def _leave(self) -> None:
        hooks, self._hooks, self._call = self._hooks, None, None
        if hooks is not None and self._calls is not None and self._calls.forward.saves_here:
            hooks.__exit__()

    def _may_begin(self) -> bool:
        """Not where a checkpoint computes again, nor in torch.func's transforms, which are left as they are."""
        return (
            torch.is_grad_enabled()
            and not self._activations.closed
            and current_backward() == -1
            and innermost_transform() is None
            and forward_mode_level() < 0
            and not is_jit_tracing()
            and not is_fx_tracing()
            and saving_hooks_allowed()
        )

    def _goes_on(self, call: weakref.ref[torch.nn.Module], module: torch.nn.Module) -> bool:
        """Whether a call is still running while another one begins. Ctrl-C ends calls and no hook hears of it."""
        running, times = call(), 0
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code is MODULE_CALL and frame.f_locals.get("self") is running:
                times += 1
            frame = frame.f_back
        return times > (running is module)

"""The calls of layers in one forward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

import torch

from ..device.torch_private import tree_leaves
from .saved_hooks import is_checkpoint, refuse_rivals


class Forward(Protocol):
    """One pass through a forward, which is told of its layers."""

    saver: int | None
    elsewhere: bool

    def begin_layer(self, inputs: Iterable[object] = ()) -> int: ...
    def resume_layer(self, layer: int | None) -> None: ...
    def end_layer(self, layer: int) -> None: ...


F = TypeVar("F", bound=Forward)


class LayerCalls(Generic[F]):
    """Follows which layers of a forward are running, and whether what they save comes to it.

    A layer inside another one interrupts it.
    """

    def __init__(self, forward: F) -> None:
        self.forward = forward
        self._running: list[tuple[torch.nn.Module, int]] = []
        self._came = False

    @property
    def running(self) -> bool:
        """Whether any layer is."""
        return bool(self._running)

    def begin(self, module: torch.nn.Module, inputs: Iterable[object]) -> None:
        """Raises ValueError inside of another offloader."""
        refuse_rivals()
        self._running.append((module, self.forward.begin_layer(inputs)))

    def end(self, module: torch.nn.Module, output: object) -> None:
        """A layer has ended. One that has not begun, as somebody else's hook raised before, ends nothing."""
        if all(module is not running for running, _ in self._running):
            return
        # What an interrupt ended in between, before it was inside of its own forward, is over as well.
        while (ended := self._running.pop())[0] is not module:
            pass
        forward = self.forward
        self._came = self._came or forward.saver == ended[1]
        if self._came or is_checkpoint():
            forward.elsewhere = False
        else:
            forward.elsewhere = forward.elsewhere or _has_graph(output)
        forward.end_layer(ended[1])
        forward.resume_layer(self._running[-1][1] if self._running else None)


def _has_graph(output: object) -> bool:
    """Whether a layer's output is of use to backward, for which the layer has to have saved something."""
    return any(isinstance(each, torch.Tensor) and each.grad_fn is not None for each in tree_leaves(output))

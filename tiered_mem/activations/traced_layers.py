"""What a trace is told of layers and of what they save."""

from __future__ import annotations

from ..device.torch_private import call_after_backward, current_backward
from ..ground.interrupts import uninterrupted
from ..ground.turn import Turn
from ..policies.base import Event, LayerBegin, LayerEnd
from ..trace.recorder import Trace
from .block import Block


class TracedLayers:
    """Gets the events that a policy gets, in their order, and tells the trace of those about layers."""

    def __init__(self, trace: Trace, turn: Turn[Block]) -> None:
        self._trace = trace
        self._turn = turn
        self._backward = -1

    def tell(self, event: Event) -> None:
        if isinstance(event, LayerBegin):
            self._trace.layer_begins(event.graph, event.layer, backward=event.backward)
            task = current_backward()
            if event.backward and task not in (-1, self._backward):
                # Nothing but the engine knows when its last layer is through.
                self._backward = task
                call_after_backward(self._backward_ends)
        elif isinstance(event, LayerEnd):
            self._trace.layer_ends(event.graph, event.layer)

    def saved(self, graph: int, layer: int, nbytes: int) -> None:
        self._trace.saved(graph, layer, nbytes)

    @uninterrupted
    def _backward_ends(self) -> None:
        with self._turn:
            self._trace.backward_ends()

"""What the policies have in common that move the blocks of a layer together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic

from .base import Action, Dropped, Event, ForwardBegin, ForwardEnd, HostPressure, LayerBegin, LayerEnd, Saved
from .ledger import G, Ledger


class LayerPolicy(ABC, Generic[G]):
    """A policy that moves the blocks of a layer together, by a plan that a subclass has for each graph.

    Under host pressure the blocks that are needed last go to disk first.
    """

    def __init__(self) -> None:
        self._ledger: Ledger[G] = Ledger()

    def decide(self, event: Event) -> Sequence[Action]:
        return self._ledger.follow(self._answer(event))

    def _answer(self, event: Event) -> Sequence[Action]:
        ledger = self._ledger
        match event:
            case Saved(number, layer, blocks):
                ledger.save(ledger.graphs[number], layer, blocks)
            case Dropped(keys):
                ledger.drop(keys)
            case LayerBegin(number, layer, backward):
                begun = ledger.graphs.get(number)
                if begun is not None:
                    begun.backward |= backward
                    return self._begin(begun, layer, backward)
            case LayerEnd(number, layer):
                graph = ledger.graphs[number]
                graph.end_layer(layer)
                return self._offload(graph)
            case ForwardBegin(number, num_layers):
                ledger.graphs[number] = self._graph(number, num_layers)
            case ForwardEnd(number):
                graph = ledger.graphs[number]
                actions = self._end(graph)
                ledger.end_forward(graph)
                return actions
            case HostPressure(nbytes):
                return ledger.spill(nbytes, self._needed_last)
        return ()

    def _needed_last(self, place: tuple[int, int]) -> tuple[bool, int, int]:
        number, layer = place
        # In a pipeline the older graphs run backward first, and one that does so now needs its blocks soonest.
        return self._ledger.graphs[number].backward, -number, self._returns(layer)

    @abstractmethod
    def _graph(self, number: int, num_layers: int) -> G:
        """A graph whose forward begins."""

    @abstractmethod
    def _begin(self, graph: G, layer: int, backward: bool) -> list[Action]:
        """A layer begins its forward or its backward."""

    @abstractmethod
    def _offload(self, graph: G) -> list[Action]:
        """Offloads the blocks of ended layers."""

    def _end(self, graph: G) -> list[Action]:
        """The forward ends."""
        return self._offload(graph)

    @abstractmethod
    def _returns(self, layer: int) -> int:
        """A number that is smaller for a layer that comes back later."""

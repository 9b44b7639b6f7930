"""Assigns each saved block to a layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

P = TypeVar("P")


@dataclass
class SavedByLayer(Generic[P]):
    """The blocks of all graphs in flight by layer, and a policy's plan for each graph.

    A block that several layers or graphs save belongs to the last of them: only then is the device done with it.
    A graph is forgotten when its forward has ended and none of its blocks is left.
    """

    _graphs: dict[int, _Graph[P]] = field(default_factory=dict)
    _home: dict[int, tuple[_Graph[P], int, int]] = field(default_factory=dict)

    def begin(self, graph: int, plan: P) -> None:
        self._graphs[graph] = _Graph(graph, plan)

    def __contains__(self, graph: int) -> bool:
        return graph in self._graphs

    def plan(self, graph: int) -> P:
        return self._graphs[graph].plan

    def home(self, key: int) -> tuple[int, int, int]:
        """The graph and the layer that a block belongs to, and its size in bytes."""
        graph, layer, nbytes = self._home[key]
        return graph.number, layer, nbytes

    def save(self, graph: int, layer: int, key: int, nbytes: int) -> None:
        into = self._graphs[graph]
        home = self._home.get(key)
        if home is not None:
            if home[0] is into and home[1] >= layer:
                return
            self.drop(key)
        self._home[key] = into, layer, nbytes
        into.blocks[layer][key] = None
        if layer in into.ended:
            into.leaving[key] = layer

    def drop(self, key: int) -> None:
        """A block that was never saved may be dropped."""
        home = self._home.pop(key, None)
        if home is None:
            return
        graph, layer, _ = home
        blocks = graph.blocks[layer]
        del blocks[key]
        if graph.leaving:
            graph.leaving.pop(key, None)
        if not blocks:
            del graph.blocks[layer]
            self._forget_if_over(graph)

    def end_layer(self, graph: int, layer: int) -> None:
        ended = self._graphs[graph]
        ended.ended.add(layer)
        ended.leaving.update(dict.fromkeys(ended.blocks.get(layer, ()), layer))

    def end_forward(self, graph: int) -> None:
        ended = self._graphs[graph]
        ended.forward = False
        self._forget_if_over(ended)

    def take_leaving(self, graph: int) -> Iterable[tuple[int, int]]:
        """Key and layer of the blocks whose layer has ended since this was last asked.

        Blocks that a layer saves after its end are among them, in their turn.
        """
        taken = self._graphs[graph]
        leaving, taken.leaving = taken.leaving, {}
        return leaving.items()

    def keys(self, graph: int, layers: Iterable[int]) -> list[int]:
        """The blocks of these layers, in the order of the layers and then of the saves."""
        blocks = self._graphs[graph].blocks
        return [key for layer in layers for key in blocks.get(layer, ())]

    def _forget_if_over(self, graph: _Graph[P]) -> None:
        if not graph.forward and not graph.blocks:
            del self._graphs[graph.number]


@dataclass
class _Graph(Generic[P]):
    """One forward and its backward. `blocks` has no layer without blocks."""

    number: int
    plan: P
    forward: bool = True
    blocks: defaultdict[int, dict[int, None]] = field(default_factory=lambda: defaultdict(dict))
    ended: set[int] = field(default_factory=set)
    leaving: dict[int, int] = field(default_factory=dict)

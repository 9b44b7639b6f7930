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

    homes: the graph and the layer that each block belongs to, and its size in bytes.
    """

    _graphs: dict[int, _Graph[P]] = field(default_factory=dict)
    homes: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    def begin(self, graph: int, plan: P) -> None:
        self._graphs[graph] = _Graph(graph, plan)

    def __contains__(self, graph: int) -> bool:
        return graph in self._graphs

    def plan(self, graph: int) -> P:
        return self._graphs[graph].plan

    def save(self, graph: int, layer: int, blocks: Iterable[tuple[int, int]]) -> None:
        """blocks: the key and the size of each."""
        into = self._graphs[graph]
        for key, nbytes in blocks:
            home = self.homes.get(key)
            if home is not None:
                if home[0] == graph and home[1] >= layer:
                    continue
                self.drop((key,))
            self.homes[key] = graph, layer, nbytes
            into.blocks[layer][key] = None
            if layer in into.ended:
                into.leaving[key] = layer

    def drop(self, keys: Iterable[int]) -> None:
        """A block that was never saved may be dropped."""
        for key in keys:
            home = self.homes.pop(key, None)
            if home is None:
                continue
            graph = self._graphs[home[0]]
            blocks = graph.blocks[home[1]]
            del blocks[key]
            if graph.leaving:
                graph.leaving.pop(key, None)
            if not blocks:
                del graph.blocks[home[1]]
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

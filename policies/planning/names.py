"""Names that events and blocks have in each step again."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..base import Dropped, Event, ForwardBegin, ForwardEnd, LayerBegin, LayerEnd, Saved, Used

Name = tuple[Any, ...]


class StepNames:
    """Names the events of one step: what happens to which graph of the step and which layer, and how often before.

    A block is named by the graph and the layer that saved it first, and its number among theirs.
    """

    def __init__(self) -> None:
        self._graphs: dict[int, int] = {}
        self._seen: Counter[Name] = Counter()
        self._blocks: dict[int, Name] = {}
        self._keys: dict[Name, int] = {}

    def event(self, event: Event) -> Name:
        """The name of an event. Blocks that it saves are named with it."""
        name: Name
        match event:
            case Saved(graph, layer, blocks):
                place = self._graph(graph), layer
                for key, _ in blocks:
                    if key not in self._blocks:
                        self._blocks[key] = block = (*place, self._count(("block", *place)))
                        self._keys[block] = key
                name = "saved", *place
            case Used(_, _, key):
                name = "used", self._blocks.get(key)
            case Dropped(keys):
                name = "dropped", self._blocks.get(keys[0]) if keys else None
            case LayerBegin(graph, layer, backward):
                name = "backward" if backward else "forward", self._graph(graph), layer
            case LayerEnd(graph, layer):
                name = "end", self._graph(graph), layer
            case ForwardBegin(graph, num_layers):
                name = "begin", self._graph(graph), num_layers
            case ForwardEnd(graph):
                name = "over", self._graph(graph)
            case _:
                name = (type(event).__name__,)
        return *name, self._count(name)

    def block(self, key: int) -> Name | None:
        """The name of a block; None where this step did not save it."""
        return self._blocks.get(key)

    def key(self, block: Name) -> int | None:
        return self._keys.get(block)

    def _graph(self, graph: int) -> int:
        return self._graphs.setdefault(graph, len(self._graphs))

    def _count(self, name: Name) -> int:
        self._seen[name] += 1
        return self._seen[name] - 1


def spoken(name: Name) -> str:
    """An event's name as people say it, such as "the backward of layer 3 of graph 0"."""
    match name:
        case "used" | "dropped" as kind, (graph, layer, number), _:
            what = f"the {'use' if kind == 'used' else 'end'} of block {number} of layer {layer} of graph {graph}"
        case "saved", graph, layer, _:
            what = f"a save of layer {layer} of graph {graph}"
        case "backward" | "forward" as kind, graph, layer, _:
            what = f"the {kind} of layer {layer} of graph {graph}"
        case "end", graph, layer, _:
            what = f"the end of layer {layer} of graph {graph}"
        case "begin" | "over" as kind, graph, *_:
            what = f"the {'beginning' if kind == 'begin' else 'end'} of the forward of graph {graph}"
        case _:
            what = f"a {name[0]}"
    return what

"""Names that events and blocks have in each step again."""

from __future__ import annotations

from typing import Any

from ..base import Dropped, Event, ForwardBegin, ForwardEnd, LayerBegin, LayerEnd, Saved, Used

Name = tuple[Any, ...]


class StepNames:
    """Names the events of one step: what happens to which graph of the step and which layer, and how often before.

    A block is named by the graph and the layer that saved it first, and its number among theirs.
    """

    def __init__(self) -> None:
        self._graphs: dict[int, int] = {}
        self._seen: dict[Name, int] = {}
        self._blocks: dict[int, Name] = {}
        self._keys: dict[Name, int] = {}

    def event(self, event: Event) -> Name:
        """The name of an event. Blocks that it saves are named with it."""
        name: Name
        if isinstance(event, Used):
            name = "used", self._blocks.get(event.key)
        elif isinstance(event, Dropped):
            name = "dropped", self._blocks.get(event.keys[0]) if event.keys else None
        elif isinstance(event, Saved):
            graph, layer = self._graph(event.graph), event.layer
            for key, _ in event.blocks:
                if key not in self._blocks:
                    self._blocks[key] = block = graph, layer, self._count(("block", graph, layer))
                    self._keys[block] = key
            name = "saved", graph, layer
        elif isinstance(event, LayerBegin):
            name = "backward" if event.backward else "forward", self._graph(event.graph), event.layer
        elif isinstance(event, LayerEnd):
            name = "end", self._graph(event.graph), event.layer
        elif isinstance(event, ForwardBegin):
            name = "begin", self._graph(event.graph), event.num_layers
        elif isinstance(event, ForwardEnd):
            name = "over", self._graph(event.graph)
        else:
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
        seen = self._seen.get(name, 0)
        self._seen[name] = seen + 1
        return seen


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

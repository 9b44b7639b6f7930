"""What the policies have in common that move the blocks of a layer together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from .actions import Action, Advice, Each, Fetch, Release, Spill
from .base import Dropped, Event, ForwardBegin, ForwardEnd, HostPressure, LayerBegin, LayerEnd, Policy, Saved
from .places import Place, Places

G = TypeVar("G", bound="Graph")


class LayerPolicy(Policy, ABC, Generic[G]):
    """A policy that moves the blocks of a layer together, by a plan that a subclass has for each graph.

    A block that several layers or graphs save belongs to the last of them: only then is the device done with it. A
    graph is dropped when its forward has ended and none of its blocks is left: what its backward saves for another
    one after that stays where it is. Under host pressure the blocks that are needed last go to disk first.
    """

    def __init__(self) -> None:
        self.places = Places()
        self._graphs: dict[int, G] = {}
        self._homes: dict[int, tuple[int, int]] = {}  # the graph and the layer that each block belongs to

    def decide(self, event: Event) -> Sequence[Advice]:
        match event:
            case Saved(number, layer, blocks):
                if (saving := self._graphs.get(number)) is not None:
                    self._save(saving, layer, blocks)
            case Dropped(keys):
                self._drop(keys)
            case LayerBegin(number, layer, backward):
                begun = self._graphs.get(number)
                if begun is not None:
                    begun.backward |= backward
                    return self._begin(begun, layer, backward)
            case LayerEnd(number, layer):
                graph = self._graphs[number]
                graph.end_layer(layer)
                return self._offload(graph)
            case ForwardBegin(number, num_layers):
                self._graphs[number] = self._graph(number, num_layers)
            case ForwardEnd(number):
                graph = self._graphs[number]
                actions = self._end(graph)
                graph.forward = False
                self._drop_if_over(graph)
                return actions
            case HostPressure(nbytes):
                return self._spill(nbytes)
        return ()

    @abstractmethod
    def _graph(self, number: int, num_layers: int) -> G:
        """A graph whose forward begins."""

    @abstractmethod
    def _begin(self, graph: G, layer: int, backward: bool) -> Sequence[Advice]:
        """A layer begins its forward or its backward."""

    @abstractmethod
    def _offload(self, graph: G) -> Sequence[Action]:
        """Offloads the blocks of ended layers."""

    def _end(self, graph: G) -> Sequence[Action]:
        """The forward ends."""
        return self._offload(graph)

    @abstractmethod
    def _returns(self, layer: int) -> int:
        """A number that is smaller for a layer that comes back later."""

    def _fetch(self, keys: Sequence[int]) -> list[Fetch]:
        """Fetches those of the blocks that are on disk."""
        return [Fetch(key) for key in self.places.on_disk(keys)]

    def _save(self, graph: G, layer: int, blocks: Iterable[tuple[int, int]]) -> None:
        home = graph.number, layer
        for key, _ in blocks:
            if key in self._homes:
                number, before = self._homes[key]
                if number == graph.number and before >= layer:
                    continue
                self._drop((key,))
            self._homes[key] = home
            graph.blocks[layer][key] = None
            if layer in graph.ended:
                graph.leaving[key] = layer

    def _drop(self, keys: Iterable[int]) -> None:
        """A block that was never saved may be dropped."""
        for key in self._homes.keys() & keys:
            number, layer = self._homes.pop(key)
            graph = self._graphs[number]
            blocks = graph.blocks[layer]
            del blocks[key]
            if graph.leaving:
                graph.leaving.pop(key, None)
            if not blocks:
                del graph.blocks[layer]
                self._drop_if_over(graph)

    def _drop_if_over(self, graph: G) -> None:
        if not graph.forward and not graph.blocks:
            del self._graphs[graph.number]

    def _spill(self, nbytes: int) -> list[Action]:
        """Sends `nbytes` on to disk. Where the host has too few blocks, leaving ones are released and go too."""
        alive = filter(None, map(self.places.find, self._homes))
        blocks = [block for block in alive if not (block.sinking or block.rising)]
        on_host = [block for block in blocks if block.place is Place.HOST]
        on_host.sort(key=lambda block: self._needed_last(*self._homes[block.key]))
        leaving = [block for block in blocks if block.place is Place.LEAVING]
        releases: list[Action] = []
        spills: list[Action] = []
        for block in (*on_host, *leaving):
            if nbytes <= 0:
                break
            if block.place is Place.LEAVING:
                releases.append(Release(block.key))
            spills.append(Spill(block.key))
            nbytes -= block.nbytes
        return releases + spills

    def _needed_last(self, number: int, layer: int) -> tuple[bool, int, int]:
        # In a pipeline the older graphs run backward first, and one that does so now needs its blocks soonest.
        return self._graphs[number].backward, -number, self._returns(layer)


def in_turn(first: Sequence[Action], then: Sequence[Action]) -> Sequence[Action]:
    """One answer of two."""
    if not (first.keys if type(first) is Each else first):
        return then
    return [*first, *then] if (then.keys if type(then) is Each else then) else first


@dataclass
class Graph:
    """One forward and its backward. A subclass adds a policy's plan.

    forward: it goes on. backward: it has begun. reloaded: the layers whose reload is past. blocks: by layer, and
    none for a layer without blocks.
    """

    number: int
    forward: bool = field(default=True, init=False)
    backward: bool = field(default=False, init=False)
    reloaded: set[int] = field(default_factory=set, init=False)
    blocks: defaultdict[int, dict[int, None]] = field(default_factory=lambda: defaultdict(dict), init=False)
    ended: set[int] = field(default_factory=set, init=False)
    leaving: dict[int, int] = field(default_factory=dict, init=False)

    def end_layer(self, layer: int) -> None:
        self.ended.add(layer)
        self.leaving.update(dict.fromkeys(self.blocks.get(layer, ()), layer))

    def take_leaving(self) -> Iterable[tuple[int, int]]:
        """Key and layer of the blocks whose layer has ended since this was last asked.

        Blocks that a layer saves after its end are among them, in their turn.
        """
        leaving, self.leaving = self.leaving, {}
        return leaving.items()

    def keys(self, layers: Iterable[int]) -> list[int]:
        """The blocks of these layers, in the order of the layers and then of the saves."""
        return [key for layer in layers for key in self.blocks.get(layer, ())]

"""What the policies have in common that move the blocks of a layer together, and where they have sent blocks."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from .base import (
    Action,
    Dropped,
    Each,
    Event,
    Fetch,
    ForwardBegin,
    ForwardEnd,
    HostPressure,
    LayerBegin,
    LayerEnd,
    Offload,
    Release,
    Saved,
    Spill,
    by_kind,
)

G = TypeVar("G", bound="Graph")


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
    def _begin(self, graph: G, layer: int, backward: bool) -> Sequence[Action]:
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


@dataclass
class Ledger(Generic[G]):
    """The blocks of all graphs in flight, and those that a policy has sent away from the device.

    A block that several layers or graphs save belongs to the last of them: only then is the device done with it. It
    is spilled at most once each time it leaves the device, and never after its reload was advised. A graph is
    dropped when its forward has ended and none of its blocks is left.
    """

    graphs: dict[int, G] = field(default_factory=dict)
    # The graph and the layer that each block belongs to, and its size in bytes.
    _homes: dict[int, tuple[tuple[int, int], int]] = field(default_factory=dict)
    _leaving: dict[int, None] = field(default_factory=dict)
    _on_host: defaultdict[tuple[int, int], dict[int, None]] = field(default_factory=lambda: defaultdict(dict))
    _on_disk: set[int] = field(default_factory=set)

    def save(self, graph: G, layer: int, blocks: Iterable[tuple[int, int]]) -> None:
        """blocks: the key and the size of each."""
        place = graph.number, layer
        for key, nbytes in blocks:
            if key in self._homes:
                self._back((key,))
                (number, before), _ = self._homes[key]
                if number == graph.number and before >= layer:
                    continue
                self.drop((key,))
            self._homes[key] = place, nbytes
            graph.blocks[layer][key] = None
            if layer in graph.ended:
                graph.leaving[key] = layer

    def drop(self, keys: Iterable[int]) -> None:
        """A block that was never saved may be dropped."""
        known = self._homes.keys() & keys
        self._back(known)
        for key in known:
            (number, layer), _ = self._homes.pop(key)
            graph = self.graphs[number]
            blocks = graph.blocks[layer]
            del blocks[key]
            if graph.leaving:
                graph.leaving.pop(key, None)
            if not blocks:
                del graph.blocks[layer]
                self._drop_if_over(graph)

    def end_forward(self, graph: G) -> None:
        graph.forward = False
        self._drop_if_over(graph)

    def follow(self, actions: Sequence[Action]) -> Sequence[Action]:
        """Takes note of an answer, and returns it."""
        if not actions:
            return actions
        back: list[int] = []
        leaving, homes = self._leaving, self._homes
        for kind, keys in by_kind(actions):
            if kind is Offload:
                leaving.update(dict.fromkeys(keys))
            elif kind is Release:
                for key in keys:
                    if key in leaving:
                        del leaving[key]
                        self._on_host[homes[key][0]][key] = None
            elif kind is Spill:
                self._back(keys)
                self._on_disk.update(keys)
            else:
                back += keys
        self._back(back)
        return actions

    def spill(self, nbytes: int, needed_last: Callable[[tuple[int, int]], Any]) -> list[Action]:
        """Sends `nbytes` on to disk. Where the host has too few blocks, leaving ones are released and go too.

        needed_last: the sort key of a graph and a layer; the blocks of the smallest go first.
        """
        releases: list[Action] = []
        spills: list[Action] = []
        on_host = (self._on_host[place] for place in sorted(self._on_host, key=needed_last))
        for key in itertools.chain(*on_host, self._leaving):
            if nbytes <= 0:
                break
            if key in self._leaving:
                releases.append(Release(key))
            spills.append(Spill(key))
            nbytes -= self._homes[key][1]
        return releases + spills

    def fetch(self, keys: Iterable[int]) -> list[Fetch]:
        """Fetches the blocks that were sent to disk."""
        return [Fetch(key) for key in keys if key in self._on_disk]

    def _back(self, keys: Iterable[int]) -> None:
        """The blocks are on the device, on their way there, or gone."""
        leaving, on_host, on_disk, homes = self._leaving, self._on_host, self._on_disk, self._homes
        for key in keys:
            if key in leaving:
                del leaving[key]
            if key in on_disk:
                on_disk.remove(key)
            if blocks := on_host.get(homes[key][0]):
                blocks.pop(key, None)
                if not blocks:
                    del on_host[homes[key][0]]

    def _drop_if_over(self, graph: G) -> None:
        if not graph.forward and not graph.blocks:
            del self.graphs[graph.number]


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

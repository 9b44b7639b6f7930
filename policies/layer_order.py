"""Offload the first k layers in the order of the forward, and bring them back early in backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .base import (
    Action,
    Dropped,
    Event,
    ForwardBegin,
    ForwardEnd,
    LayerBegin,
    LayerEnd,
    Offload,
    Release,
    Reload,
    Saved,
)


class LayerOrderPolicy:
    """Offloads the activations of the first `num_layers` layers; None means all of the model's.

    With k of N layers offloaded the device holds the activations of N - k layers, in forward and in backward, as
    in Transformer Engine's default schedule: layer i is released when layer N - k + i begins its forward, and
    reloaded when layer N - k + i - 1 begins its backward. With k = N nothing is resident after the forward; the
    last layers are then reloaded when their own backward begins.

    in_flight: layers that the device may hold beyond that while their copies are under way. With k = N or N - 1
        there is otherwise no time in which a copy could overlap compute; 1 is enough to hide it.

    Raises ValueError for a number below 0.
    """

    def __init__(self, num_layers: int | None = None, *, in_flight: int = 0) -> None:
        if num_layers is not None and num_layers < 0:
            raise ValueError(f"num_layers must be 0 or more, not {num_layers}")
        if in_flight < 0:
            raise ValueError(f"in_flight must be 0 or more, not {in_flight}")
        self._num_layers = num_layers
        self._in_flight = in_flight
        self._graphs: dict[int, _Graph] = {}
        self._graph_of: dict[int, int] = {}

    def check(self, num_layers: int) -> None:
        if self._num_layers is not None and self._num_layers > num_layers:
            raise ValueError(
                f"LayerOrderPolicy(num_layers={self._num_layers}) offloads more layers than the model has "
                f"({num_layers}); use at most {num_layers}"
            )

    def decide(self, event: Event) -> Sequence[Action]:
        match event:
            case ForwardBegin(graph, num_layers):
                k = num_layers if self._num_layers is None else self._num_layers
                self._graphs[graph] = _Graph(num_layers, k, self._in_flight)
            case Saved(graph, layer, key):
                if self._graph_of.get(key, graph) != graph:
                    self._drop(key)  # two forwards saved it, an input of both perhaps: the later one has it now
                self._graph_of[key] = graph
                self._graphs[graph].save(layer, key)
            case LayerEnd(graph, layer):
                return [Offload(key) for key in self._graphs[graph].keys(layer)]
            case LayerBegin(graph, layer, backward=False):
                return [Release(key) for key in self._graphs[graph].released_by(layer)]
            case LayerBegin(graph, layer, backward=True):
                if graph in self._graphs:
                    return [Reload(key) for key in self._graphs[graph].reloaded_by(layer)]
            case ForwardEnd(graph):
                released = [Release(key) for key in self._graphs[graph].end_forward()]
                self._forget_if_empty(graph)
                return released
            case Dropped(key):
                if key in self._graph_of:
                    self._drop(key)
        return ()

    def _drop(self, key: int) -> None:
        graph = self._graph_of.pop(key)
        self._graphs[graph].drop(key)
        self._forget_if_empty(graph)

    def _forget_if_empty(self, graph: int) -> None:
        if self._graphs[graph].over:
            del self._graphs[graph]


@dataclass
class _Graph:
    """One forward and the backward that follows it."""

    num_layers: int
    offloaded: int
    in_flight: int
    forward: bool = True
    reached: int = -1
    layer_of: dict[int, int] = field(default_factory=dict)
    saved: defaultdict[int, dict[int, None]] = field(default_factory=lambda: defaultdict(dict))

    def __post_init__(self) -> None:
        self.reached = self.num_layers

    @property
    def over(self) -> bool:
        return not self.forward and not self.layer_of

    def save(self, layer: int, key: int) -> None:
        """A block saved by two layers belongs to the later one: only then is the device done with it."""
        if key in self.layer_of:
            del self.saved[self.layer_of[key]][key]
        self.layer_of[key] = layer
        self.saved[layer][key] = None

    def drop(self, key: int) -> None:
        del self.saved[self.layer_of.pop(key)][key]

    def keys(self, layer: int) -> Iterable[int]:
        return list(self.saved[layer]) if layer < self.offloaded else ()

    def released_by(self, layer: int) -> Iterable[int]:
        return self._keys_of(i for i in range(self.offloaded) if self._release_at(i) == layer)

    def end_forward(self) -> Iterable[int]:
        self.forward = False
        return self._keys_of(range(self.offloaded))

    def reloaded_by(self, layer: int) -> Iterable[int]:
        """Layers due since the last one, but none above `layer`: a backward that jumps ahead must not bring
        everything in at once. What is left out is fetched when it is needed."""
        last = self.reached if layer < self.reached else layer + 1
        self.reached = layer
        due = (i for i in range(min(self.offloaded, layer + 1)) if layer <= self._reload_at(i) < last)
        return self._keys_of(sorted(due, reverse=True))

    def _release_at(self, i: int) -> int:
        return max(i + 1, self.num_layers - self.offloaded + i) + self.in_flight

    def _reload_at(self, i: int) -> int:
        due = max(i, self.num_layers - 1 - self.offloaded + i) + self.in_flight
        return min(due, self.num_layers - 1)

    def _keys_of(self, layers: Iterable[int]) -> Iterable[int]:
        return [key for layer in layers for key in self.saved[layer]]

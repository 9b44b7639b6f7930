"""Offload the first k layers in the order of the forward, and bring them back early in backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .base import (
    Action,
    Dropped,
    Event,
    ForwardBegin,
    ForwardEnd,
    HostPressure,
    LayerBegin,
    LayerEnd,
    Offload,
    Release,
    Reload,
    Saved,
)
from .saved_by_layer import SavedByLayer
from .sent_away import SentAway


class LayerOrderPolicy:
    """Offloads the activations of the first `num_layers` layers; None means all of the model's.

    With k of N layers offloaded the device holds the activations of N - k layers, in forward and in backward, as
    in Transformer Engine's default schedule: layer i is released when layer N - k + i begins its forward, and
    reloaded when layer N - k + i - 1 begins its backward. With k = N nothing is resident after the forward; the
    last layers are then reloaded when their own backward begins. N is what the forward was told; where more layers
    run, backward counts these too, and where fewer do, what has not been released is when the forward ends.

    in_flight: layers that the device may hold beyond that while their copies are under way. With k = N or N - 1
        there is otherwise no time in which a copy could overlap compute; 1 is enough to hide it.

    Under host pressure the lowest layers go to disk first, and those of the newest graph before those of others.
    What is on disk is fetched one layer before its reload.

    Raises ValueError for a number below 0.
    """

    def __init__(self, num_layers: int | None = None, *, in_flight: int = 0) -> None:
        if num_layers is not None and num_layers < 0:
            raise ValueError(f"num_layers must be 0 or more, not {num_layers}")
        if in_flight < 0:
            raise ValueError(f"in_flight must be 0 or more, not {in_flight}")
        self._num_layers = num_layers
        self._in_flight = in_flight
        self._saved: SavedByLayer[_Plan] = SavedByLayer()
        self._away = SentAway()

    def check(self, num_layers: int) -> None:
        if self._num_layers is not None and self._num_layers > num_layers:
            raise ValueError(
                f"LayerOrderPolicy(num_layers={self._num_layers}) offloads more layers than the model has "
                f"({num_layers}); use at most {num_layers}"
            )

    def decide(self, event: Event) -> Sequence[Action]:
        return self._away.follow(self._answer(event), self._saved.homes)

    def _answer(self, event: Event) -> Sequence[Action]:
        saved = self._saved
        match event:
            case Saved(graph, layer, blocks):
                homes = saved.homes
                self._away.forget([key for key, _ in blocks if key in homes])
                saved.save(graph, layer, blocks)
            case Dropped(keys):
                self._away.forget(keys)
                saved.drop(keys)
            case LayerBegin(graph, layer, backward=True):
                if graph in saved:
                    return self._bring_back(graph, layer)
            case LayerBegin(graph, layer):
                released = saved.plan(graph).released_by(layer)
                return self._offload(graph) + [Release(key) for key in saved.keys(graph, released)]
            case LayerEnd(graph, layer):
                saved.end_layer(graph, layer)
                return self._offload(graph)
            case ForwardBegin(graph, num_layers):
                saved.begin(graph, _Plan(num_layers, self._num_layers, self._in_flight))
            case ForwardEnd(graph):
                away = saved.plan(graph).released_by_end()
                actions = self._offload(graph) + [Release(key) for key in saved.keys(graph, away)]
                saved.end_forward(graph)
                return actions
            case HostPressure(nbytes):
                return self._away.spill(nbytes, self._needed_last)
        return ()

    def _bring_back(self, graph: int, layer: int) -> list[Action]:
        plan = self._saved.plan(graph)
        reloaded = self._saved.keys(graph, plan.reloaded_by(layer))
        return [*map(Reload, reloaded), *self._away.fetch(self._saved.keys(graph, plan.reloaded_after(layer)))]

    def _needed_last(self, place: tuple[int, int]) -> tuple[bool, int, int]:
        graph, layer = place
        # In a pipeline the older graphs run backward first, and one that does so now needs its blocks soonest.
        return self._saved.plan(graph).reached is not None, -graph, layer

    def _offload(self, graph: int) -> list[Action]:
        offloaded = self._saved.plan(graph).offloaded
        return [Offload(key) for key, layer in self._saved.take_leaving(graph) if layer < offloaded]


@dataclass
class _Plan:
    """When the layers of one graph move. `num_layers` grows where more layers run than were told."""

    num_layers: int
    wanted: int | None
    in_flight: int
    gap: int = field(init=False)
    offloaded: int = field(init=False)
    reached: int | None = None
    reloaded: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.offloaded = self.num_layers if self.wanted is None else self.wanted
        self.gap = max(1, self.num_layers - self.offloaded) + self.in_flight

    def released_by(self, layer: int) -> Iterable[int]:
        self.num_layers = max(self.num_layers, layer + 1)
        if self.wanted is None:
            self.offloaded = self.num_layers
        i = layer - self.gap
        return (i,) if 0 <= i < self.offloaded and i not in self.reloaded else ()

    def released_by_end(self) -> Iterable[int]:
        return (i for i in range(self.offloaded) if i not in self.reloaded)

    def reloaded_by(self, layer: int) -> Iterable[int]:
        """Layers due since the last one, but none above `layer`: a backward that jumps ahead must not bring
        everything in at once. What that leaves out comes when its own backward begins."""
        last = self.num_layers if self.reached is None else self.reached
        if layer >= last:  # a second backward, or one that does not go down
            last = layer + 1
        self.reached = layer
        due = self._due(layer, last)
        if layer < self.offloaded and layer not in self.reloaded:
            due.add(layer)
        self.reloaded |= due
        return sorted(due, reverse=True)

    def reloaded_after(self, layer: int) -> Iterable[int]:
        """Layers due when the layer below begins its backward."""
        return sorted(self._due(layer - 1, layer), reverse=True)

    def _due(self, layer: int, last: int) -> set[int]:
        return {i for i in range(min(self.offloaded, layer + 1)) if layer <= self._reload_at(i) < last}

    def _reload_at(self, i: int) -> int:
        due = max(i, self.num_layers - 1 - self.offloaded + i) + self.in_flight
        return min(due, self.num_layers - 1)

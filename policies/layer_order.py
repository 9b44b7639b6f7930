"""Offload the first k layers in the order of the forward, and bring them back early in backward."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import get_args

from ..ground.arguments import one_of, whole_number
from .actions import Action, Advice, Each, How, Offload, Recompute, Release, Reload
from .by_layer import Graph, LayerPolicy, in_turn


class LayerOrderPolicy(LayerPolicy["_Plan"]):
    """Offloads the activations of the first `offload` layers; None means all of the model's.

    With k of N layers offloaded the device holds the activations of N - k layers, in forward and in backward, as
    in Transformer Engine's default schedule: layer i is released when layer N - k + i begins its forward, and
    reloaded when layer N - k + i - 1 begins its backward. With k = N nothing is resident after the forward; the
    last layers are then reloaded when their own backward begins. N is what the forward was told; where more layers
    run, backward counts these too, and where fewer do, what has not been released is when the forward ends.

    Under host pressure the lowest layers go to disk first, and those of the newest graph before those of others.
    What is on disk is fetched one layer before its reload.

    Args:
        offload: How many layers are offloaded. None is all.
        in_flight: Layers that the device may hold beyond that while their copies are under way. With k = N or N - 1
            there is otherwise no time in which a copy could overlap compute; 1 is enough to hide it. None is 1
            there, and 0 for fewer layers.
        recompute: "cheap" or "full": all layers are computed again in that way (see `Recompute`), and what they
            keep moves. None is none.
        num_layers: The former name of `offload`, with a DeprecationWarning.

    Raises:
        TypeError: A number is no int.
        ValueError: A number is below 0, or there is no such way to compute again.
    """

    def __init__(
        self,
        offload: int | None = None,
        *,
        in_flight: int | None = None,
        recompute: How | None = None,
        num_layers: int | None = None,
    ) -> None:
        if num_layers is not None:
            warnings.warn("LayerOrderPolicy(num_layers=) is now offload=", DeprecationWarning, stacklevel=2)
            if offload is not None:
                raise TypeError("num_layers is the former name of offload: give one of them")
            offload = num_layers
        if offload is not None:
            whole_number("offload", offload, at_least=0)
        if in_flight is not None:
            whole_number("in_flight", in_flight, at_least=0)
        super().__init__()
        self._recompute = one_of("recompute", recompute, (*get_args(How), None))
        self._offload_layers = offload
        self._in_flight = in_flight

    def check(self, num_layers: int) -> None:
        if self._offload_layers is not None and self._offload_layers > num_layers:
            raise ValueError(
                f"LayerOrderPolicy(offload={self._offload_layers}) offloads more layers than the model has "
                f"({num_layers}); use at most {num_layers}"
            )

    def _graph(self, number: int, num_layers: int) -> _Plan:
        return _Plan(number, num_layers, self._offload_layers, self._in_flight)

    def _begin(self, graph: _Plan, layer: int, backward: bool) -> Sequence[Advice]:
        if backward:
            reloaded, fetched = graph.keys(graph.reloaded_by(layer)), graph.keys(graph.reloaded_after(layer))
            return in_turn(Each(Reload, reloaded), self._fetch(fetched))
        released = graph.released_by(layer)
        actions = in_turn(self._offload(graph), Each(Release, graph.keys(released)))
        return actions if self._recompute is None else [Recompute(layer, self._recompute), *actions]

    def _offload(self, graph: _Plan) -> Sequence[Action]:
        offloaded = graph.offloaded
        return Each(Offload, [key for key, layer in graph.take_leaving() if layer < offloaded])

    def _end(self, graph: _Plan) -> Sequence[Action]:
        away = (i for i in range(graph.offloaded) if i not in graph.reloaded)
        return in_turn(self._offload(graph), Each(Release, graph.keys(away)))

    def _returns(self, layer: int) -> int:
        return layer


@dataclass
class _Plan(Graph):
    """A graph with the times at which its layers move. `num_layers` grows where more run than were told."""

    num_layers: int
    wanted: int | None
    wanted_in_flight: int | None
    offloaded: int = field(init=False)
    in_flight: int = field(init=False)
    gap: int = field(init=False)
    reached: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.offloaded = self.num_layers if self.wanted is None else self.wanted
        no_time = self.offloaded >= self.num_layers - 1
        self.in_flight = int(no_time) if self.wanted_in_flight is None else self.wanted_in_flight
        self.gap = max(1, self.num_layers - self.offloaded) + self.in_flight

    def released_by(self, layer: int) -> Iterable[int]:
        if layer >= self.num_layers:
            self.num_layers = layer + 1
            self.offloaded = self.num_layers if self.wanted is None else self.wanted
        i = layer - self.gap
        return (i,) if 0 <= i < self.offloaded and i not in self.reloaded else ()

    def reloaded_by(self, layer: int) -> Iterable[int]:
        """Layers due since the last one, but none above `layer`: a backward that jumps ahead must not bring
        everything in at once. What that leaves out comes when its own backward begins."""
        last = self.num_layers if self.reached is None else self.reached
        if layer >= last:  # a second backward, or one that does not go down
            last = layer + 1
        self.reached = layer
        due = set(self._due(layer, last))
        if layer < self.offloaded and layer not in self.reloaded:
            due.add(layer)
        self.reloaded |= due
        return sorted(due, reverse=True)

    def reloaded_after(self, layer: int) -> Iterable[int]:
        """Layers due when the layer below begins its backward."""
        return reversed(self._due(layer - 1, layer))

    def _due(self, layer: int, last: int) -> range:
        """The layers that are reloaded when the backward begins of `layer`, or of one between it and `last`."""
        ahead = max(0, self.num_layers - 1 - self.offloaded) + self.in_flight
        end = min(self.offloaded, layer + 1)  # layer i comes back with layer i + ahead, or else with the last one
        if last < self.num_layers:
            end = min(end, last - ahead)
        return range(max(0, layer - ahead), end) if layer < self.num_layers else range(0)

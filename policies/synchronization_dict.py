"""Releases and reloads each layer by the user's schedule, as a pipeline of microbatches needs it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from .base import Action, Offload, Release, Reload
from .by_layer import Graph, LayerPolicy
from .schedule import Moment, Order, Stay, check_together, parse_order


class SynchronizationDictPolicy(LayerPolicy["_Graph"]):
    """Offloads the layers that are keys of `schedule`, each at its own two moments.

    Layers are numbered by the order in which their forwards begin. A layer's copy to the host begins when its
    forward ends. At one moment, releases come before reloads.

    schedule: layer -> (offload_fwd, offload_num, reload_fwd, reload_num). The layer's device memory is released
        when layer `offload_num` begins its forward (offload_fwd is True) or its backward (False); its reload starts
        when layer `reload_num` begins its forward or its backward. A reload at the layer's own backward overlaps
        with nothing.
    order: all forwards and backwards of a step, such as ["F0", "F1", "B1", "B0"]. With it the schedule is checked
        exactly; without it, an entry that is wrong only for some orders of the backwards is accepted.

    A layer that is not back when its own backward begins is reloaded then. Under host pressure the layers that are
    reloaded last go to disk first, and they are fetched at the reload before theirs. Without `order` all forwards
    are assumed to come before the backwards, and the backwards to go from the last layer to the first.

    Raises ValueError for an entry of another form; for one that releases a layer before its forward is over,
    reloads it before it is released, or needs it before it is reloaded; and for entries that fit no common order.
    """

    def __init__(
        self, schedule: Mapping[int, tuple[bool, int, bool, int]], *, order: Sequence[str] | None = None
    ) -> None:
        super().__init__()
        self._stays = {layer: _stay(layer, entry) for layer, entry in schedule.items()}
        moments = None if order is None else parse_order(order)
        self._ordered_layers = None if moments is None else len(moments) // 2
        if self._ordered_layers is not None:
            self._check_layers_exist("order", self._ordered_layers)
        known = Order(moments)
        for stay in self._stays.values():
            stay.check(known)
        check_together(self._stays.values())

        self._released_at = _by_moment((self._stays[i].release, i) for i in sorted(self._stays))
        as_needed = sorted(self._stays, key=lambda layer: known.time(Moment(layer, True)))
        self._reloaded_at = _by_moment((self._stays[i].reload, i) for i in as_needed)
        reloads = sorted(self._reloaded_at, key=known.time)
        self._fetched_at = {at: self._reloaded_at[following] for at, following in pairwise(reloads)}
        returning = [layer for at in reloads for layer in self._reloaded_at[at]]
        self._place = {layer: place for place, layer in enumerate(returning)}

    def check(self, num_layers: int) -> None:
        if self._ordered_layers not in (None, num_layers):
            raise ValueError(f"order has {self._ordered_layers} layers, but the model has {num_layers}")
        self._check_layers_exist("the model", num_layers)

    def _graph(self, number: int, num_layers: int) -> _Graph:
        return _Graph(number)

    def _begin(self, graph: _Graph, layer: int, backward: bool) -> list[Action]:
        moment = Moment(layer, backward)
        due = dict.fromkeys(self._reloaded_at.get(moment, ()))
        if backward and layer in self._stays:
            due[layer] = None  # late, unless it is back already
        reloaded = [i for i in due if i not in graph.reloaded]
        graph.reloaded.update(reloaded)
        actions = self._offload(graph)
        past = graph.released | graph.reloaded
        released = [i for i in self._released_at.get(moment, ()) if i not in past]
        graph.released.update(released)
        actions += [Release(key) for key in graph.keys(released)]
        actions += [Reload(key) for key in graph.keys(reloaded)]
        return [*actions, *self._ledger.fetch(graph.keys(self._fetched_at.get(moment, ())))]

    def _offload(self, graph: _Graph) -> list[Action]:
        """Offloads the blocks of ended layers, and releases them at once where their release is past."""
        leaving = [
            (key, layer)
            for key, layer in graph.take_leaving()
            if layer in self._stays and layer not in graph.reloaded
        ]
        offloads = [Offload(key) for key, _ in leaving]
        return [*offloads, *(Release(key) for key, layer in leaving if layer in graph.released)]

    def _returns(self, layer: int) -> int:
        return -self._place[layer]

    def _check_layers_exist(self, owner: str, num_layers: int) -> None:
        has = f"{owner} has {num_layers} layers, counted from 0"
        for layer, stay in self._stays.items():
            if layer >= num_layers:
                raise ValueError(f"layer {layer} has an entry, but {has}")
            if stay.release.layer >= num_layers:
                raise ValueError(f"layer {layer} is never released: it waits until {stay.release}, but {has}")
            if stay.reload.layer >= num_layers:
                raise ValueError(f"layer {layer} is never reloaded: it waits until {stay.reload}, but {has}")


@dataclass
class _Graph(Graph):
    """A graph with the layers whose release is past. A moment that comes again changes nothing."""

    released: set[int] = field(default_factory=set)


def _by_moment(pairs: Iterable[tuple[Moment, int]]) -> dict[Moment, list[int]]:
    layers: dict[Moment, list[int]] = {}
    for moment, layer in pairs:
        layers.setdefault(moment, []).append(layer)
    return layers


def _stay(layer: int, entry: tuple[bool, int, bool, int]) -> Stay:
    if not _is_number(layer):
        raise ValueError(f"{layer!r} is a key of the schedule; layers are numbers from 0")
    match entry:
        case (bool(), release, bool(), reload) if _is_number(release) and _is_number(reload):
            # True stands for forward there, and for backward in a moment.
            return Stay(layer, Moment(release, not entry[0]), Moment(reload, not entry[2]))
    raise ValueError(
        f"the entry of layer {layer} must be (offload_fwd, offload_num, reload_fwd, reload_num) with True or False "
        f"and layer numbers from 0, not {entry!r}"
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0

"""Releases and reloads each layer by the user's schedule, as a pipeline of microbatches needs it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import NamedTuple

from ..ground.arguments import items
from .actions import Action, Offload, Release, Reload
from .by_layer import Graph, LayerPolicy


class SynchronizationDictPolicy(LayerPolicy["_Progress"]):
    """Offloads the layers that are keys of `schedule`, each at its own two moments.

    Layers are numbered by the order in which their forwards begin. A layer's copy to the host begins when its
    forward ends. At one moment, releases come before reloads.

    A layer that is not back when its own backward begins is reloaded then. Under host pressure the layers that are
    reloaded last go to disk first, and they are fetched at the reload before theirs. Without `order` all forwards
    are assumed to come before the backwards, and the backwards to go from the last layer to the first.

    Args:
        schedule: layer -> (offload_fwd, offload_num, reload_fwd, reload_num). The layer's device memory is released
            when layer `offload_num` begins its forward (offload_fwd is True) or its backward (False); its reload
            starts when layer `reload_num` begins its forward or its backward. A reload at the layer's own backward
            overlaps with nothing.
        order: All forwards and backwards of a step, such as ["F0", "F1", "B1", "B0"]. With it the schedule is
            checked exactly; without it, an entry that is wrong only for some orders of the backwards is accepted.

    Raises:
        ValueError: An entry has another form, releases a layer before its forward is over, reloads it before it is
            released, or needs it before it is reloaded; or entries fit no common order.
    """

    def __init__(
        self, schedule: Mapping[int, tuple[bool, int, bool, int]], *, order: Sequence[str] | None = None
    ) -> None:
        super().__init__()
        if not isinstance(schedule, Mapping):
            raise TypeError(f"schedule must be a mapping from layers to entries, not {schedule!r}")
        self._stays = {layer: _stay(layer, entry) for layer, entry in schedule.items()}
        moments = None if order is None else _parse_order(order)
        self._ordered_layers = None if moments is None else len(moments) // 2
        if self._ordered_layers is not None:
            self._check_layers_exist("order", self._ordered_layers)
        known = _Order(moments)
        for stay in self._stays.values():
            stay.check(known)
        _check_together(self._stays.values())

        self._released_at = _by_moment((self._stays[i].release, i) for i in sorted(self._stays))
        as_needed = sorted(self._stays, key=lambda layer: known.time(_Moment(layer, True)))
        self._reloaded_at = _by_moment((self._stays[i].reload, i) for i in as_needed)
        reloads = sorted(self._reloaded_at, key=known.time)
        self._fetched_at = {at: self._reloaded_at[following] for at, following in pairwise(reloads)}
        returning = [layer for at in reloads for layer in self._reloaded_at[at]]
        self._place = {layer: place for place, layer in enumerate(returning)}

    def check(self, num_layers: int) -> None:
        if self._ordered_layers not in (None, num_layers):
            raise ValueError(f"order has {self._ordered_layers} layers, but the model has {num_layers}")
        self._check_layers_exist("the model", num_layers)

    def _graph(self, number: int, num_layers: int) -> _Progress:
        return _Progress(number)

    def _begin(self, graph: _Progress, layer: int, backward: bool) -> list[Action]:
        moment = _Moment(layer, backward)
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
        return [*actions, *self._fetch(graph.keys(self._fetched_at.get(moment, ())))]

    def _offload(self, graph: _Progress) -> list[Action]:
        """Offloads the blocks of ended layers, and releases them at once where their release is past."""
        leaving = [
            (key, layer)
            for key, layer in graph.take_leaving()
            if layer in self._stays and layer not in graph.reloaded
        ]
        offloads = [Offload(key) for key, _ in leaving]
        return [*offloads, *(Release(key) for key, layer in leaving if layer in graph.released)]

    def _returns(self, layer: int) -> int:
        # A layer that stays may save a block that has left with another: that is needed soonest.
        return -self._place[layer] if layer in self._place else 1

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
class _Progress(Graph):
    """A graph with the layers whose release is past. A moment that comes again changes nothing."""

    released: set[int] = field(default_factory=set)


class _Moment(NamedTuple):
    """A layer begins its forward or its backward."""

    layer: int
    backward: bool

    @property
    def name(self) -> str:
        return f"{'backward' if self.backward else 'forward'} of layer {self.layer}"

    def __str__(self) -> str:
        return f"layer {self.layer} begins its {'backward' if self.backward else 'forward'}"


@dataclass(frozen=True)
class _Stay:
    """How long a layer's activations are off the device: they leave at `release` and come back from `reload` on."""

    layer: int
    release: _Moment
    reload: _Moment

    @property
    def forward(self) -> _Moment:
        return _Moment(self.layer, False)

    @property
    def backward(self) -> _Moment:
        return _Moment(self.layer, True)

    def check(self, order: _Order) -> None:
        """Raises ValueError where the stay does not lie between the layer's forward and backward."""
        fault = None
        if order.not_after(self.release, self.forward):
            fault = "its own forward is not over when it is released"
        elif self.release == self.reload:
            fault = "it is reloaded at the moment at which it is released"
        elif order.not_after(self.reload, self.release):
            fault = "it is reloaded before it is released"
        elif order.not_after(self.reload, self.forward):
            fault = "it is reloaded before its own forward is over"
        elif order.not_after(self.backward, self.release) or order.before(self.backward, self.reload):
            fault = "its own backward needs it before it is reloaded"
        if fault is not None:
            raise ValueError(
                f"layer {self.layer} is released when {self.release} and reloaded when {self.reload}, but {fault}"
            )

    def demands(self) -> list[tuple[_Moment, _Moment]]:
        """Pairs of moments of which the first must come before the second."""
        pairs = [(self.forward, self.release), (self.release, self.reload), (self.reload, self.backward)]
        return [(first, second) for first, second in pairs if first != second]


class _Order:
    """The order of moments, as far as it is known.

    Always known: forwards begin in the order of the layers' numbers, and a layer's forward comes before its
    backward. The order of the backwards is known only where `moments` gives the order of all.
    """

    def __init__(self, moments: Sequence[_Moment] | None = None) -> None:
        self._place = None if moments is None else {moment: place for place, moment in enumerate(moments)}

    def not_after(self, first: _Moment, second: _Moment) -> bool:
        """Whether `first` is known to come before `second`, or is the same."""
        if self._place is not None:
            return self._place[first] <= self._place[second]
        return first == second or (not first.backward and first.layer <= second.layer)

    def before(self, first: _Moment, second: _Moment) -> bool:
        return first != second and self.not_after(first, second)

    def time(self, moment: _Moment) -> tuple[int, ...]:
        """A number, or two, that is smaller for a moment that comes earlier.

        Where that is not told, as in a plain model: forwards before backwards, and these from the last layer on.
        """
        if self._place is None:
            return moment.backward, -moment.layer if moment.backward else moment.layer
        return (self._place[moment],)


def _check_together(stays: Iterable[_Stay]) -> None:
    """Raises ValueError where each stay is possible, but no order of the backwards suits all of them."""
    demanded: dict[tuple[_Moment, _Moment], set[int]] = {}
    for stay in stays:
        for pair in stay.demands():
            demanded.setdefault(pair, set()).add(stay.layer)
    known = _Order()
    layers = sorted({moment.layer for pair in demanded for moment in pair})
    before: dict[_Moment, set[_Moment]] = {_Moment(i, True): {_Moment(i, False)} for i in layers}
    before |= {_Moment(j, False): {_Moment(i, False)} for i, j in pairwise(layers)}
    for first, second in demanded:
        before.setdefault(second, set()).add(first)
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        cycle = error.args[1]
        clash = [pair for pair in pairwise(cycle) if not known.before(*pair)]
        wishes = [
            f"layer {layer} needs the {first.name} to begin before the {second.name}"
            for first, second in clash
            for layer in sorted(demanded[first, second])
        ]
        raise ValueError(f"no order of the backwards suits these entries together: {'; '.join(wishes)}") from None


def _parse_order(order: Sequence[str]) -> list[_Moment]:
    """The moments of "F0", "F1", "B0", ... Raises ValueError where they are no order of whole layers."""
    moments: list[_Moment] = []
    for place, text in enumerate(items("order", order)):
        if not isinstance(text, str) or not re.fullmatch("[FB][0-9]+", text):
            raise ValueError(f"order[{place}] is {text!r}; use F or B with the number of a layer, such as 'F0'")
        moment = _Moment(int(text[1:]), text[0] == "B")
        if moment in moments:
            raise ValueError(f"order has {text} twice")
        if not moment.backward and moment.layer != (forwards := sum(not m.backward for m in moments)):
            raise ValueError(
                f"order has {text} where F{forwards} is due: layers are numbered as their forwards begin"
            )
        if moment.backward and _Moment(moment.layer, False) not in moments:
            raise ValueError(f"order has {text} and no F{moment.layer} before it")
        moments.append(moment)
    for moment in moments:
        if _Moment(moment.layer, True) not in moments:
            raise ValueError(f"order has F{moment.layer} and no B{moment.layer}")
    return moments


def _by_moment(pairs: Iterable[tuple[_Moment, int]]) -> dict[_Moment, list[int]]:
    layers: dict[_Moment, list[int]] = {}
    for moment, layer in pairs:
        layers.setdefault(moment, []).append(layer)
    return layers


def _stay(layer: int, entry: tuple[bool, int, bool, int]) -> _Stay:
    if not _is_number(layer):
        raise ValueError(f"{layer!r} is a key of the schedule; layers are numbers from 0")
    match entry:
        case (bool(), release, bool(), reload) if _is_number(release) and _is_number(reload):
            # True stands for forward there, and for backward in a moment.
            return _Stay(layer, _Moment(release, not entry[0]), _Moment(reload, not entry[2]))
    raise ValueError(
        f"the entry of layer {layer} must be (offload_fwd, offload_num, reload_fwd, reload_num) with True or False "
        f"and layer numbers from 0, not {entry!r}"
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0

"""The moments of a training step at which a layer's forward or backward begins, and their order."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import NamedTuple


class Moment(NamedTuple):
    """A layer begins its forward or its backward."""

    layer: int
    backward: bool

    @property
    def name(self) -> str:
        return f"{'backward' if self.backward else 'forward'} of layer {self.layer}"

    def __str__(self) -> str:
        return f"layer {self.layer} begins its {'backward' if self.backward else 'forward'}"


@dataclass(frozen=True)
class Stay:
    """How long a layer's activations are off the device: they leave at `release` and come back from `reload` on."""

    layer: int
    release: Moment
    reload: Moment

    @property
    def forward(self) -> Moment:
        return Moment(self.layer, False)

    @property
    def backward(self) -> Moment:
        return Moment(self.layer, True)

    def check(self, order: Order) -> None:
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

    def demands(self) -> list[tuple[Moment, Moment]]:
        """Pairs of moments of which the first must come before the second."""
        pairs = [(self.forward, self.release), (self.release, self.reload), (self.reload, self.backward)]
        return [(first, second) for first, second in pairs if first != second]


class Order:
    """The order of moments, as far as it is known.

    Always known: forwards begin in the order of the layers' numbers, and a layer's forward comes before its
    backward. The order of the backwards is known only where `moments` gives the order of all.
    """

    def __init__(self, moments: Sequence[Moment] | None = None) -> None:
        self._place = None if moments is None else {moment: place for place, moment in enumerate(moments)}

    def not_after(self, first: Moment, second: Moment) -> bool:
        """Whether `first` is known to come before `second`, or is the same."""
        if self._place is not None:
            return self._place[first] <= self._place[second]
        return first == second or (not first.backward and first.layer <= second.layer)

    def before(self, first: Moment, second: Moment) -> bool:
        return first != second and self.not_after(first, second)

    def time(self, moment: Moment) -> tuple[int, ...]:
        """A number, or two, that is smaller for a moment that comes earlier.

        Where that is not told, as in a plain model: forwards before backwards, and these from the last layer on.
        """
        if self._place is None:
            return moment.backward, -moment.layer if moment.backward else moment.layer
        return (self._place[moment],)


def check_together(stays: Iterable[Stay]) -> None:
    """Raises ValueError where each stay is possible, but no order of the backwards suits all of them."""
    demanded: dict[tuple[Moment, Moment], set[int]] = {}
    for stay in stays:
        for pair in stay.demands():
            demanded.setdefault(pair, set()).add(stay.layer)
    known = Order()
    layers = sorted({moment.layer for pair in demanded for moment in pair})
    before: dict[Moment, set[Moment]] = {Moment(i, True): {Moment(i, False)} for i in layers}
    before |= {Moment(j, False): {Moment(i, False)} for i, j in pairwise(layers)}
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


def parse_order(order: Sequence[str]) -> list[Moment]:
    """The moments of "F0", "F1", "B0", ... Raises ValueError where they are no order of whole layers."""
    moments: list[Moment] = []
    for place, text in enumerate(order):
        if not isinstance(text, str) or not re.fullmatch("[FB][0-9]+", text):
            raise ValueError(f"order[{place}] is {text!r}; use F or B with the number of a layer, such as 'F0'")
        moment = Moment(int(text[1:]), text[0] == "B")
        if moment in moments:
            raise ValueError(f"order has {text} twice")
        if not moment.backward and moment.layer != (forwards := sum(not m.backward for m in moments)):
            raise ValueError(
                f"order has {text} where F{forwards} is due: layers are numbered as their forwards begin"
            )
        if moment.backward and Moment(moment.layer, False) not in moments:
            raise ValueError(f"order has {text} and no F{moment.layer} before it")
        moments.append(moment)
    for moment in moments:
        if Moment(moment.layer, True) not in moments:
            raise ValueError(f"order has F{moment.layer} and no B{moment.layer}")
    return moments

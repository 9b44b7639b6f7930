"""Where a step waits by its plan, and why: stalls of single blocks as waits of layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ...sizes import format_bytes, format_seconds
from .link import Link
from .names import Name
from .plan import Cause, Plan, PlannedStall
from .profile import Profile

_FORWARD, _BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class LayerStall:
    """Compute waits for copies while a layer's forward or backward runs, or before the first layer (None).

    graph: the number of the forward in its step, from 0. seconds: as planned. measured: seconds, or None where
    they were not measured. why: what the longest of the planned waits is for, and why that is late; empty where
    none is planned.
    """

    graph: int
    layer: int | None
    backward: bool
    seconds: float
    measured: float | None
    why: str

    def __str__(self) -> str:
        where = "before the first layer"
        if self.layer is not None:
            where = f"{_BACKWARD if self.backward else _FORWARD} of layer {self.layer}"
            where += f" of graph {self.graph}" if self.graph else ""
        measured = "" if self.measured is None else f"{format_seconds(self.measured)} measured"
        if not self.why:
            return f"{where}: {measured}, not planned"
        return f"{where}: {format_seconds(self.seconds)}{measured and f' ({measured})'}; {self.why}"


_Place = tuple[int, int | None, bool]


class Stalls:
    """Says of a plan for a step where it waits and why.

    names, blocks: of the step's positions and blocks.
    """

    def __init__(self, profile: Profile, plan: Plan, names: Sequence[Name], blocks: Sequence[Name], link: Link):
        self._profile = profile
        self._plan = plan
        self._blocks = blocks
        self._link = link
        self._places = _places(names)
        self._clock = profile.clock
        self._out = sorted(plan.release)
        self._back = sorted(plan.reload, key=lambda b: (plan.reload[b], profile.used[b]))
        self._late: list[float] = []  # before each stall
        late = 0.0
        for stall in plan.stalls:
            self._late.append(late)
            late += stall.seconds

    def by_layer(self, waits: Sequence[float] = (), names: Sequence[Name] = ()) -> tuple[LayerStall, ...]:
        """The longest first.

        waits: measured seconds at the last positions of a step with these names; empty is not measured.
        """
        found: dict[_Place, LayerStall] = {}
        longest: dict[_Place, int] = {}
        stalls = self._plan.stalls
        for i, stall in enumerate(stalls):
            place = self._places[stall.position]
            before = found.get(place) or LayerStall(*place, 0.0, 0.0 if waits else None, "")
            found[place] = replace(before, seconds=before.seconds + stall.seconds)
            if place not in longest or stall.seconds > stalls[longest[place]].seconds:
                longest[place] = i
        for place, wait in zip(_places(names)[len(names) - len(waits) :], waits, strict=True):
            if wait > 0:
                before = found.get(place) or LayerStall(*place, 0.0, 0.0, "")
                found[place] = replace(before, measured=(before.measured or 0.0) + wait)
        told = [replace(each, why=self._why(longest[at]) if at in longest else "") for at, each in found.items()]
        return tuple(sorted(told, key=lambda each: max(each.seconds, each.measured or 0.0), reverse=True))

    def _why(self, i: int) -> str:
        """What a stall waits for, and why that has not ended."""
        stall = self._plan.stalls[i]
        b = stall.block
        end = self._clock[stall.position] + self._late[i] + stall.seconds
        if stall.cause is Cause.RELEASE:
            what = f"the release of {self._named([b])} waits for its copy out"
            issued = self._at(self._profile.saved[b])
            queue, rate = self._out, self._link.out
        else:
            what = f"waits for the reload of {self._named([b])}"
            issued = self._at(self._plan.reload[b], reloads=True)
            queue, rate = self._back, self._link.back
        begun = end - self._seconds(b, rate)
        before = self._in_front(queue, queue.index(b), begun - issued, rate)
        if before:
            return f"{what}: the link is busy with {self._named(before)} before it"
        earlier = end - stall.seconds - issued
        if stall.cause is Cause.RELEASE:
            return f"{what}: it was saved only {format_seconds(earlier)} before"
        if earlier <= 0:
            return f"{what}: there is no room for it before its use"
        return f"{what}: there is room for it only {format_seconds(earlier)} before its use"

    def _at(self, position: int, *, reloads: bool = False) -> float:
        """When a position comes, with the stalls before it; for reloads, with what is released there as well."""
        late = 0.0
        for stall in self._plan.stalls:
            if stall.position < position or (reloads and self._released(stall, position)):
                late += stall.seconds
        return self._clock[position] + late

    @staticmethod
    def _released(stall: PlannedStall, position: int) -> bool:
        return stall.position == position and stall.cause is Cause.RELEASE

    def _in_front(self, queue: Sequence[int], place: int, seconds: float, rate: float) -> list[int]:
        """The copies that keep a queue busy for so long before the one at a place; none for less than its own time.

        A copy that shares the link with the other direction takes longer than it should, up to that much.
        """
        own = self._seconds(queue[place], rate)
        if seconds <= own * max(0.1, 1 / self._link.both - 1):
            return []
        found: list[int] = []
        for b in reversed(queue[:place]):
            found.append(b)
            seconds -= self._seconds(b, rate)
            if seconds <= 0.05 * own:
                break
        return found

    def _seconds(self, b: int, rate: float) -> float:
        return self._profile.nbytes[b] / rate + self._link.latency

    def _named(self, blocks: Iterable[int]) -> str:
        """Such as "36.0 MiB of layers 4 to 6"."""
        blocks = list(blocks)
        nbytes = sum(self._profile.nbytes[b] for b in blocks)
        return f"{format_bytes(nbytes)} of {layers_named(self._blocks[b][1] for b in blocks)}"


def layers_named(numbers: Iterable[int]) -> str:
    """Such as "layer 4" and "layers 4 to 6"."""
    first, last = min(found := set(numbers)), max(found)
    return f"layer {first}" if first == last else f"layers {first} to {last}"


def _places(names: Sequence[Name]) -> list[_Place]:
    """Of each position the graph, and the layer that began last."""
    place: _Place = (0, None, False)
    found = []
    for name in names:
        if name[0] in (_FORWARD, _BACKWARD):
            place = (name[1], name[2], name[0] == _BACKWARD)
        found.append(place)
    return found


def layer_times(profile: Profile, names: Sequence[Name]) -> dict[tuple[int, int], tuple[int, float]]:
    """Of each graph's layers the position at which the forward ends, and its seconds."""
    begun: dict[tuple[int, int], int] = {}
    found = {}
    clock = profile.clock
    for k, name in enumerate(names):
        if name[0] == _FORWARD:
            begun[name[1], name[2]] = k
        elif name[0] == "end" and (first := begun.get((name[1], name[2]))) is not None:
            found[name[1], name[2]] = (k, clock[k] - clock[first])
    return found

"""How the layers of a step are treated, for people: which of them, what that saves and takes, and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from ...sizes import format_bytes, format_seconds
from ..actions import How
from .disk_and_states import StatesShare, states_to_keep
from .planner import least_memory
from .profile import BudgetTooSmall, Link, Profile
from .stitching import Choice, RecordedStep, Way, Ways

# Of the step's compute time: so much waiting is none.
_NONE = 0.005
# So many ranges of layers are spelled out.
_RANGES = 3


@dataclass(frozen=True)
class Treatment:
    """How some layers of a step are treated.

    how: "cheap" or "full", as a layer is computed again; None for those that keep all that they save.
    layers: their numbers, rising.
    less: the bytes that they save less than if all was kept, and that are neither held nor moved.
    again: the seconds by which computing them again makes the step longer, before all waits.
    why: in words, what the step would be otherwise.
    """

    how: How | None
    layers: tuple[int, ...]
    less: int
    again: float
    why: str

    def __str__(self) -> str:
        which = layers_counted(self.layers)
        if self.how is None:
            return f"{which} keep{'s' if len(self.layers) == 1 else ''} all" + (f": {self.why}" if self.why else "")
        return (
            f'{which} "{self.how}": {format_bytes(self.less)} less to hold or move, {format_seconds(self.again)} '
            f"of computing again; {self.why}"
        )


@dataclass(frozen=True)
class Tried:
    """What is known by now of how steps like the last can be treated.

    ways: the step with all layers treated in one way, for each; None while these are not known, and where there are
    none. trying: they are being tried, or what was chosen by them is. undecided: steps are still to be tried or
    timed.
    """

    ways: Ways | None
    trying: bool
    undecided: bool


class Treated:
    """Says of a step how its layers are treated.

    ways: the step, as it is if all layers are treated in one way. budget: for all, with the optimizer states that
    are kept.
    """

    def __init__(self, ways: Ways, choice: Choice, budget: int, link: Link, states: StatesShare) -> None:
        self._ways = ways
        self._choice = choice
        self._budget = budget
        self._link = link
        self._states = states

    def treatments(self) -> tuple[Treatment, ...]:
        """One for each that layers have, with those first that keep all. It takes some twenty plans of each."""
        by_way: dict[Way, list[int]] = {}
        for layer in sorted({of[2] for of in self._ways.layers if of is not None}):
            by_way.setdefault(self._choice.get(layer), []).append(layer)
        found = []
        kept = by_way.pop(None, None)
        if kept is not None:
            why = "" if by_way else "to compute any of them again would not make this step shorter"
            found.append(Treatment(None, tuple(kept), 0, 0.0, why))
        now = self._seconds(self._ways.stitched(self._choice).profile) if by_way else 0.0
        for how, layers in sorted(by_way.items(), key=lambda item: str(item[0])):
            less, again = self._gained(how, layers)
            found.append(Treatment(how, tuple(layers), less, again, self._why(layers, now)))
        return tuple(found)

    def _gained(self, how: Way, layers: Sequence[int]) -> tuple[int, float]:
        """The bytes that these layers save less, and the seconds that they take more."""
        plain, step = self._ways.steps[None], self._ways.steps[how]
        parts = [k for k, of in enumerate(self._ways.layers) if of is not None and of[2] in layers]
        less = sum(_bytes(plain, k) - _bytes(step, k) for k in parts)
        return less, sum(max(0.0, step.seconds[k] - plain.seconds[k]) for k in parts)

    def _why(self, layers: Sequence[int], now: float) -> str:
        """What the step would be if these layers kept all."""
        if now == inf:
            return "the step does not fit, and would lack more else"
        choice = {layer: how for layer, how in self._choice.items() if layer not in layers}
        step = self._ways.stitched(choice).profile
        longer = self._seconds(step) - now
        if longer == inf:
            return "else the step would not fit"
        most, kept = max(step.full), self._states.kept
        lacking = most + kept - self._budget
        link = self._states.beside(self._link, step, most + kept, kept).link
        hidden = most - least_memory(step, most, link, _NONE).peak
        told = f"else the step would be {format_seconds(max(0.0, longer))} longer"
        if lacking <= hidden:
            return told
        return f"{told}, as the link hides {format_bytes(hidden)} of {format_bytes(lacking)} that would not fit"

    def _seconds(self, step: Profile) -> float:
        """Infinite where the step does not fit, as where the host has too little room."""
        try:
            return states_to_keep(step, self._budget, self._link, self._states)[1]
        except BudgetTooSmall:
            return inf


def _bytes(step: RecordedStep, part: int) -> int:
    """What a part saves."""
    return sum(step.profile.nbytes[b] for b in step.saved[part])


def treatable(ways: Ways, budget: int) -> list[int]:
    """The layers that have room to be computed again within a budget."""
    backwards = ways.steps[None].backwards().items()
    return sorted(n for n, each in backwards if each.standing + each.coming(0, 0, trial=False) <= budget)


def layers_counted(numbers: Iterable[int]) -> str:
    """Such as "18 layers (14 to 31)"."""
    found = sorted(set(numbers))
    ends = [None, *(k for k, (a, b) in enumerate(pairwise(found), 1) if b > a + 1), None]
    runs = [found[a:z] for a, z in pairwise(ends)]
    told = ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
    if len(runs) > _RANGES:
        told = f"among {found[0]} to {found[-1]}"
    return f"{len(found)} layer{'' if len(found) == 1 else 's'} ({told})"

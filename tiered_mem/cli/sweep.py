"""The step of a training within budgets, by each of the ways in which it can keep to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..policies.actions import How
from ..policies.planning import Link, Profile, plan
from ..policies.planning.advice import moved
from ..policies.planning.choosing import choose
from ..policies.planning.disk_and_states import StatesShare, states_to_keep
from ..policies.planning.profile import floor
from ..policies.planning.stitching import Choice, RecordedStep, Way, Ways
from ..policies.planning.treated import treatable
from ..policies.planning.treatments import WORTH

# Budgets from the least to what is enough, and numbers of checkpointed layers, that are looked at.
_POINTS = 8
_NUMBERS = 64


@dataclass(frozen=True)
class BudgetRow:
    """The step within a budget. In bytes and seconds; None where it cannot keep to it so.

    seconds: with policy="auto", and peak, waits, moved and states_kept are its. mix: so many layers are computed
    again, by how. least: no plan with this mix is below. plain: all is on the device. checkpointed: the best number
    of layers, first or last ones, is computed again as a whole, and nothing of them moves; that many
    checkpointed_layers. moving: nothing is computed again.
    """

    budget: int
    peak: int
    seconds: float
    waits: float
    least: float
    moved: int
    states_kept: int
    mix: Mapping[How, int]
    plain: float | None
    checkpointed: float | None
    checkpointed_layers: int | None
    moving: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Sweep:
    """Plans a step for budgets.

    ways: the step in each way in which its layers can be treated; with the plain one alone nothing can be computed
    again.
    """

    def __init__(self, ways: Ways, link: Link, states: StatesShare) -> None:
        self._ways = ways
        self._plain = ways.steps[None].profile
        self._link = link
        self._states = states
        self._checkpoints = self._checkpointed() if "full" in ways.steps else []

    def within(self, budgets: Collection[int]) -> list[BudgetRow]:
        """Of those budgets that the step can be run in."""
        least = max(floor(self._plain.moments), self._states.step_peak)
        return [self._within(each) for each in sorted(budgets) if each >= least]

    def budgets(self) -> list[int]:
        """From the least possible one to what is enough to move nothing."""
        least = max(floor(self._plain.moments), self._states.step_peak)
        most = max(self._plain.moments.full) + self._states.total
        return sorted({least + (most - least) * k // (_POINTS - 1) for k in range(_POINTS)})

    def _within(self, budget: int) -> BudgetRow:
        moving = self._planned(self._plain, budget, {})
        best = self._planned(*self._chosen(budget))
        times = [(self._all_there(step, budget), count) for count, step in self._checkpoints]
        fitting = [(seconds, count) for seconds, count in times if seconds is not None]
        checkpointed, layers = min(fitting, default=(None, None))
        fits = max(*self._plain.full, self._states.step_peak) + self._states.total <= budget
        return BudgetRow(
            **best,
            plain=self._plain.compute if fits else None,
            checkpointed=checkpointed,
            checkpointed_layers=layers,
            moving=moving["seconds"],
        )

    def _chosen(self, budget: int) -> tuple[Profile, int, Choice]:
        """The step with its layers treated as policy="auto" would."""
        if len(self._ways.steps) == 1:
            return self._plain, budget, {}
        chosen = choose(*(self._ways, budget, self._link, self._states, treatable(self._ways, budget)), now={})
        if chosen.seconds > (1 - WORTH) * chosen.before:
            return self._plain, budget, {}
        return self._ways.stitched(chosen.choice).profile, budget, chosen.choice

    def _planned(self, step: Profile, budget: int, choice: Choice) -> dict[str, Any]:
        states = self._states
        kept = states_to_keep(step, budget, self._link, states)[0] if states.total else 0
        beside = states.beside(self._link, step, budget, kept)
        made = plan(step, budget - kept, beside.link)
        return {
            "budget": budget,
            "peak": max(made.peak, states.step_peak) + kept,
            "seconds": made.seconds + beside.seconds,
            "waits": made.waits,
            "least": made.bound + beside.seconds,
            "moved": moved(step, made),
            "states_kept": kept,
            "mix": dict(Counter(choice.values())),
        }

    def _all_there(self, step: Profile, budget: int) -> float | None:
        """The seconds of a step of which nothing moves but the optimizer states that find no room beside it."""
        room = budget - max(*step.full, self._states.step_peak)
        if room < 0:
            return None
        kept = min(self._states.total, room)
        return step.compute + self._states.beside(self._link, step, budget, kept).seconds

    def _checkpointed(self) -> list[tuple[int, Profile]]:
        """The step with so many of its first or last layers computed again as a whole."""
        layers = sorted({of[2] for of in self._ways.layers if of is not None})
        found = []
        for count in range(len(layers), 0, -max(1, len(layers) // _NUMBERS)):
            for some in (layers[:count], layers[-count:]):
                found.append((count, self._ways.stitched(dict.fromkeys(some, "full")).profile))
        return found


def ways_of(found: Mapping[str, Any]) -> Ways:
    """What a rehearsal has found of the step. With no ways to treat its layers it is the plain one alone."""
    steps: dict[Way, RecordedStep] = {
        each["how"]: RecordedStep(
            _names(each["names"]), _names(each["blocks"]), Profile(**each["profile"]), each["treated"]
        )
        for each in found["ways"]
    }
    return Ways(steps or {None: RecordedStep(_names(found["names"]), (), Profile(**found["step"]))})


def _names(found: Sequence[Any]) -> list[Any]:
    """Tuples are lists in JSON."""
    return [tuple(_names(each)) if isinstance(each, list) else each for each in found]

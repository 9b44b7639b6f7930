"""The steps that are known, and the plans for them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf
from typing import NamedTuple

from .bound import BudgetTooSmall
from .disk import plan_disk
from .link import Link
from .names import Name
from .needs import explained
from .plan import DiskPlan, Plan
from .planner import plan
from .profile import Profile
from .recording import Recording
from .share import StatesShare, states_to_keep
from .table import Table

_log = logging.getLogger("tiered_mem.policies")
_KEPT = 4
# Lengths are planned for in steps of this share of the recorded one.
_GRID = 128
# So many blocks show of which kind a step is.
COMPARED = 8
# Of new seconds in the mean of them and the old.
_NEW = 0.25
# Memory beside the blocks is planned for in steps of this share of the budget; a plan for so much more will do.
_GRAIN = 1 / 4096
_NEAR = 1 / 256
# A plan is changed where its prediction changes by more than this share.
_CHANGE = 0.01


class Variant(NamedTuple):
    """How a step differs from the recorded one of its kind.

    ratio: its length over that one's. more: bytes of the device that are taken when it begins, and were not then.
    """

    ratio: float = 1.0
    more: int = 0


_RECORDED = Variant()


@dataclass
class Known:
    """A step that was recorded. tables: what was planned for it and its variants.

    guessed: its times are not to go by for long. Those of its first positions are another kind's, or it was the
    first step of all, in which much is done that later ones need not do, or optimizer states have moved since.
    """

    course: Sequence[Name]
    uses: int
    names: Sequence[Name]
    blocks: Sequence[Name]
    profile: Profile
    guessed: bool = False
    tables: dict[Variant, Table] = field(default_factory=dict)

    def ratios(self, sizes: Sequence[int]) -> list[float]:
        """How much larger the first blocks are than the recorded ones."""
        return [max(size, 1) / max(known, 1) for size, known in zip(sizes, self.profile.nbytes, strict=False)]


class Repertoire:
    """The last four kinds of steps. Plans them, for any length, with the same budget and link.

    host_bytes: what the host tier holds; None plans nothing for the drive below it.
    margin: bytes of the budget that a plan has only where it needs them.
    states: optimizer states that may have a part of the budget. The target falls with each kind of step that would
    rather have it, and rises only with their total, so that they do not come and go with the steps.
    """

    def __init__(
        self,
        budget: int,
        link: Link,
        host_bytes: int | None,
        slowdown: float | None,
        states: StatesShare,
        margin: int = 0,
    ) -> None:
        self.budget = budget
        self._margin = margin
        self.link = link
        self._host_bytes = host_bytes
        self._slowdown = slowdown
        self._states = states
        self._known: list[Known] = []  # the one that was used last comes last
        self._told = inf  # from this ratio on it has been said that a step may run out of memory
        self._unplanned_told = False

    def __len__(self) -> int:
        return len(self._known)

    def find(self, course: Sequence[Name], sizes: Sequence[int], standing: int) -> tuple[Known, Variant] | None:
        """The kind of a step that begins like this and whose first blocks have these sizes, and how it differs.

        standing: the bytes that are taken when it begins.

        Of several it is the one to which all of the sizes have the same ratio, which is no shorter, and was used
        last.
        """
        fitting = [known for known in self._known if known.course[: len(course)] == course]
        if not fitting:
            return None

        def unlike(known: Known) -> tuple[float, bool]:
            ratios = known.ratios(sizes[:COMPARED])
            return _spread(ratios), max(ratios, default=1.0) > 1.01

        found = min(reversed(fitting), key=unlike)
        self._known.remove(found)
        self._known.append(found)
        ratio = found.ratios(sizes)[0] if sizes else 1.0
        ratio = 1.0 if abs(ratio - 1) < 0.01 else ceil(ratio * _GRID) / _GRID
        more = standing - found.profile.standing[0] if found.profile.standing else 0
        return found, self._variant(found, ratio, more)

    def _variant(self, known: Known, ratio: float, more: int) -> Variant:
        """The nearest that a plan was made for, or one that it is to be made for."""
        grain = max(1, int(self.budget * _GRAIN))
        exact = Variant(ratio, -(-more // grain) * grain)
        near = self.budget * _NEAR
        made = (each for each in known.tables if each.ratio == ratio and 0 <= each.more - exact.more <= near)
        return min(made, default=exact)

    def add(self, recording: Recording, seconds: Sequence[float], like: Known | None, variant: Variant) -> None:
        """Takes a step over, and plans for it.

        seconds: of its positions, or of the last of them, if it began `like` a variant of a known one.

        Raises BudgetTooSmall for the first step. A later one that the budget is too small for is left out.
        """
        before = len(recording.names) - len(seconds)
        begun = (
            [0.0] * before
            if like is None
            else recording.take_over(before, like.names, like.profile.scaled(*variant))
        )
        profile = recording.profile([*begun, *seconds])
        if self._states.step_peak:
            # The optimizer's step was another one then: with no states yet, or with others on the device.
            profile = profile.ending_below(self._states.step_peak)
        blocks = list(recording.blocks)
        guessed = before > 0 or not self._known
        known = Known(recording.course, recording.uses, recording.names, blocks, profile, guessed=guessed)
        try:
            self.table(known, strict=True)
        except BudgetTooSmall as error:
            if not self._known:
                raise
            if not self._unplanned_told:
                self._unplanned_told = True
                _log.warning(
                    "there is no plan for a step that is not like those before: %s. It is said once", str(error)
                )
            return
        self._known = [*self._known[1 - _KEPT :], known]

    def table(self, known: Known, variant: Variant = _RECORDED, *, strict: bool = False) -> Table:
        """What to answer in a step. strict: raises BudgetTooSmall, in place of a plan with the least possible."""
        if self._states.total and (self._states.target is None or not self._states.fit(self._room)):
            self._states.target = None
            self.replan()
        made = known.tables.get(variant)
        if made is None:
            profile = known.profile if variant == _RECORDED else known.profile.scaled(*variant)
            try:
                first = self._plan(profile)
            except BudgetTooSmall as error:
                # In no variable: an error that is raised here would keep all that is under way, and itself.
                if strict:
                    raise explained(error, profile, known.names, self._states) from None
                if variant.ratio <= self._told / 2:  # not for each of many sizes
                    self._told = variant.ratio
                    _log.warning(
                        "a step of %.2f times the recorded size, or of more, may take more than the budget: %s",
                        *(variant.ratio, explained(error, profile, known.names, self._states)),
                    )
                self._states.target = 0
                first = plan(profile, error.floor, self.link)
            made = Table(profile, first, self._disk(profile, first), known.names, known.blocks)
            known.tables[variant] = made
        return made

    def grow(self, known: Known, variant: Variant, recording: Recording) -> int:
        """Plans for a kind of steps with as much memory at each position as the fullest of them had there.

        recording: of a step of this variant whose blocks had other sizes. Returns the most bytes by which it was
        above all before, where that passes the budget.
        """
        names = recording.names
        if len(names) != len(known.names) or set(names) != set(known.names):
            return 0
        seen, known_now = recording.profile([0.0] * len(names)), known.profile.scaled(*variant)
        at = dict(zip(names, zip(seen.full, seen.transient, strict=True), strict=True))
        full = [at[name][0] for name in known.names]
        transient = [at[name][1] for name in known.names]
        more = [max(0, new - old) for new, old in zip(full, known_now.full, strict=True)]
        grown = max((m for m, now in zip(more, full, strict=True) if now > self.budget), default=0)
        sudden = max(map(int.__sub__, transient, known_now.transient), default=0)
        if max(grown, sudden) > self.budget * _GRAIN:
            known.profile = known.profile.fuller(more, transient)
            known.tables.clear()
        return grown

    def same(self, recording: Recording) -> Known | None:
        """The kind of steps that a recording is of, if there is one with the same events and sizes."""
        sizes = [life.nbytes for life in recording.blocks.values()]
        for known in self._known:
            if known.names == recording.names and known.profile.nbytes == sizes:
                return known
        return None

    def states_moved(self) -> None:
        """Optimizer states are elsewhere now: the times that are known are not to go by for long."""
        for known in self._known:
            known.guessed = True

    def drift(self, known: Known, variant: Variant, seconds: Sequence[float], out: float, back: float) -> None:
        """Plans a kind of steps anew, by the times and rates of another one, if that changes the prediction.

        seconds: of each position, for a step of this variant. out, back: rates; 0 is not known.
        """
        tables, profile, link = known.tables, known.profile, self.link
        share = 1.0 if known.guessed else _NEW
        mean = [
            (1 - share) * old + share * new / variant.ratio
            for old, new in zip(profile.seconds, seconds, strict=True)
        ]
        known.profile = replace(profile, seconds=mean)
        known.guessed = False
        self.link = replace(link, out=out or link.out, back=back or link.back)
        known.tables = {}
        made = self.table(known, variant)
        before = tables[variant].plan.seconds if variant in tables else 0.0
        if abs(made.plan.seconds - before) <= _CHANGE * before:
            known.tables = tables
        else:
            for other in self._known:
                if other is not known:
                    other.tables.clear()

    def replan(self, budget: int | None = None, margin: int | None = None) -> None:
        """Plans are made anew, for this budget and margin if they are told."""
        self.budget = self.budget if budget is None else budget
        self._margin = self._margin if margin is None else margin
        for known in self._known:
            known.tables.clear()

    def _plan(self, profile: Profile) -> Plan:
        states = self._states
        if states.total and states.target != 0:
            keep = self._to_keep(profile)
            if states.target is None or keep < states.target:
                states.target = keep
                self.replan()
        try:
            return self._within(profile, self._room - states.planned)
        except BudgetTooSmall:
            if not self._margin:
                raise
        return self._within(profile, self.budget - states.planned)

    @property
    def _room(self) -> int:
        """The budget for plans that can do without the margin."""
        return self.budget - self._margin

    def _to_keep(self, profile: Profile) -> int:
        try:
            return states_to_keep(profile, self._room, self.link, self._states)[0]
        except BudgetTooSmall:
            return 0  # what such a step needs it needs for blocks

    def _within(self, profile: Profile, budget: int) -> Plan:
        if self._slowdown is None:
            return plan(profile, budget, self.link)
        return least_memory(profile, budget, self.link, self._slowdown)

    def _disk(self, profile: Profile, first: Plan) -> DiskPlan | None:
        if self.link.drive is None or self._host_bytes is None:
            return None
        try:
            return plan_disk(profile, first, self._host_bytes, self.link, self.link.drive)
        except BudgetTooSmall as error:
            _log.info("what is spilled is decided when the host is full: %s", str(error))
            return None


def least_memory(profile: Profile, budget: int, link: Link, slowdown: float) -> Plan:
    """A plan with as little memory as a slowdown allows, and at most the budget. Raises BudgetTooSmall.

    slowdown: the share of the step's compute time by which it may be longer. Where the budget itself is slower, it
    is planned for.
    """
    best = plan(profile, budget, link)
    allowed = profile.compute * (1 + slowdown)
    low, high = 0, best.peak
    for _ in range(8):
        middle = (low + high) // 2
        try:
            made = plan(profile, middle, link)
        except BudgetTooSmall as error:
            low = max(middle, error.floor - 1)
            continue
        if made.seconds <= allowed:
            best, high = made, made.peak
        else:
            low = middle
    return best


def _spread(ratios: Sequence[float]) -> float:
    """How far ratios are apart; less than one in a hundred does not count."""
    spread = max(ratios, default=1.0) / max(min(ratios, default=1.0), 1e-9) - 1
    return spread if spread >= 0.01 else 0.0

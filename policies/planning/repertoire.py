"""The steps that are known, and for each the plan it has, as answers to events."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, inf
from typing import NamedTuple

from .disk_and_states import Beside, StatesShare, explained, paced, plan_disk, states_to_keep
from .planner import least_memory, plan
from .profile import BudgetTooSmall, DiskPlan, Link, Plan, Profile, floor, least_bytes
from .rates import Rates
from .recording import Name, Recording, whole
from .stitching import Choice, RecordedStep
from .table import Table

_log = logging.getLogger("tiered_mem.policies")
_KEPT = 8
# Lengths are planned for in steps of this share of the recorded one.
_GRID = 128
# This part of the room is left free where layers are treated in a new way, and no step of that kind was recorded.
TRIED = 100
# So many blocks show of which kind a step is.
COMPARED = 8
# Of new seconds in the mean of them and the old.
_NEW = 0.25
# Memory beside the blocks is planned for in steps of this share of the budget; a plan for so much more will do.
_GRAIN = 1 / 4096
_NEAR = 1 / 256
# Steps are of two kinds where one begins with so much more memory taken: what it has from the beginning, such as
# gradients, may come to stay in the other.
_APART = 1 / 64
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

    sizes: of its blocks, each once, in the order of their saves. blocks: the names of all their lives.
    guessed: its times are not to go by for long. Those of its first positions are another kind's, or it was the
    first step of all, in which much is done that later ones need not do, or optimizer states have moved since.
    choice: how its layers are treated. stitched: it was not recorded, but made of such that were.
    """

    course: Sequence[Name]
    uses: int
    names: Sequence[Name]
    blocks: Sequence[Name]
    profile: Profile
    guessed: bool = False
    choice: Choice = field(default_factory=dict)
    stitched: bool = False
    tables: dict[Variant, Table] = field(default_factory=dict)

    @property
    def standing(self) -> int:
        """The bytes that were taken when it began."""
        return self.profile.standing[0] if self.profile.standing else 0

    @cached_property
    def sizes(self) -> list[int]:
        return [size for size, name in zip(self.profile.nbytes, self.blocks, strict=True) if name == whole(name)]

    def ratios(self, sizes: Sequence[int]) -> list[float]:
        """How much larger the first blocks are than the recorded ones."""
        return [max(size, 1) / max(known, 1) for size, known in zip(sizes, self.sizes, strict=False)]


class Repertoire:
    """The last eight kinds of steps. Plans them, for any length, with the same budget and link.

    host_bytes: what the host tier holds, or a function that says it; None plans nothing for the drive below it.
    margin: bytes of the budget that a plan has only where it needs them.
    states: optimizer states that may have a part of the budget. The target falls with each kind of step that would
    rather have it, and rises only with their total, so that they do not come and go with the steps.
    """

    def __init__(
        self,
        budget: int,
        link: Link,
        host_bytes: int | Callable[[], int | None] | None,
        slowdown: float | None,
        states: StatesShare,
        margin: int = 0,
    ) -> None:
        self.budget = budget
        self._margin, self._reserve = margin, 0
        self.rates = Rates(link)
        self._host_bytes = host_bytes
        self._slowdown = slowdown
        self.states = states
        self._crossing = states.crossing(0)  # what plans were made for
        self._known: list[Known] = []  # the one that was used last comes last
        self._told = inf  # from this ratio on it has been said that a step may run out of memory
        self._unplanned_told = False
        self._held: int | None = None  # by the host tier, when it was found full

    def __len__(self) -> int:
        return len(self._known)

    def find(
        self, course: Sequence[Name], sizes: Sequence[int], standing: int, choice: Choice
    ) -> tuple[Known, Variant] | None:
        """The kind of a step that begins like this and whose first blocks have these sizes, and how it differs.

        standing: the bytes that are taken when it begins. choice: how its layers are treated.

        Of several it is the one to which all of the sizes have the same ratio, which is no shorter, began with
        about as much, and was used last.
        """
        fitting = [
            known for known in self._known if known.choice == choice and known.course[: len(course)] == course
        ]
        if not fitting:
            return None

        def unlike(known: Known) -> tuple[float, bool, bool]:
            ratios = known.ratios(sizes[:COMPARED])
            return _spread(ratios), max(ratios, default=1.0) > 1.01, self.apart(standing - known.standing)

        found = min(reversed(fitting), key=unlike)
        self._known.remove(found)
        self._known.append(found)
        ratio = found.ratios(sizes)[0] if sizes else 1.0
        ratio = 1.0 if abs(ratio - 1) < 0.01 else ceil(ratio * _GRID) / _GRID
        more = standing - found.standing
        return found, self._variant(found, ratio, more)

    def apart(self, more: int) -> bool:
        """Whether a step that begins with so many bytes more, or less, is of another kind."""
        return abs(more) > self.budget * _APART

    def _variant(self, known: Known, ratio: float, more: int) -> Variant:
        """The nearest that a plan was made for, or one that it is to be made for."""
        grain = max(1, int(self.budget * _GRAIN))
        exact = Variant(ratio, -(-more // grain) * grain)
        near = self.budget * _NEAR
        made = (each for each in known.tables if each.ratio == ratio and 0 <= each.more - exact.more <= near)
        return min(made, default=exact)

    def alone(self, known: Known) -> bool:
        """Whether it is the only kind whose layers are treated so."""
        return all(each is known or each.choice != known.choice for each in self._known)

    def add(
        self,
        recording: Recording,
        seconds: Sequence[float],
        like: Known | None,
        variant: Variant,
        choice: Choice,
        update: int,
        *,
        strict: bool = True,
    ) -> Known | None:
        """Takes a step over, and plans for it.

        seconds: of its positions, or of the last of them, if it began `like` a variant of a known one. choice: how
        its layers were treated. update: the most bytes of the device while optimizers stepped in it.

        Raises BudgetTooSmall for the first step, if that is `strict`: else it has a plan with the least possible. A
        later one that the budget is too small for is left out.
        """
        before = len(recording.names) - len(seconds)
        begun = (
            [0.0] * before
            if like is None
            else recording.take_over(before, like.names, like.profile.scaled(*variant))
        )
        profile, blocks = self._profile(recording, [*begun, *seconds], update)
        guessed = before > 0 or not self._known
        known = Known(
            recording.course, recording.uses, recording.names, blocks, profile, guessed=guessed, choice=choice
        )
        try:
            self.table(known, strict=strict or bool(self._known))
        except BudgetTooSmall as error:
            if not self._known:
                raise
            if not self._unplanned_told:
                self._unplanned_told = True
                _log.warning(
                    "there is no plan for a step that is not like those before: %s. It is said once", str(error)
                )
            return None
        self._take(known)
        return known

    def shortfall(self, recording: Recording, others: int, budget: int) -> BudgetTooSmall | None:
        """Why no plan can keep a budget in a step like this one, if none can.

        others: bytes that were taken beside its blocks after its last event, at the fullest.
        """
        profile, _ = self._profile(recording, [0.0] * len(recording.names), self.states.step_peak, others)
        least = least_bytes(profile)  # it takes no times
        worst = least.index(max(least))
        if least[worst] <= budget:
            return None
        lives = zip(profile.nbytes, profile.saved, profile.dropped, strict=True)
        unmovable = profile.full[worst] - sum(n for n, saved, dropped in lives if saved <= worst < dropped)
        error = BudgetTooSmall(budget, least[worst], worst, unmovable)
        return explained(error, profile, recording.names, self.states)

    def _profile(
        self, recording: Recording, seconds: Sequence[float], update: int, others: int = 0
    ) -> tuple[Profile, list[Name]]:
        profile, blocks = recording.profile(seconds)
        if self.link.drive is not None:
            profile = replace(profile, earlier=())  # what stays on the host beside that goes on to the drive
        *unmovable, last = profile.unmovable
        profile = replace(profile, unmovable=[*unmovable, max(last, others)])
        if self.states.step_peak:
            # The optimizer's step was another one then: with no states yet, or with others on the device.
            profile = profile.ending_below(self.states.step_peak, update)
        return profile, blocks

    def stitch(self, step: RecordedStep, choice: Choice) -> bool:
        """Takes over a step whose layers are to be treated so from now on. Whether one like it is still to be
        recorded."""
        course = [name for name in step.names if name[0] not in ("used", "dropped")]
        uses = sum(name[0] == "used" for name in step.names)
        self.states.target = None  # it has room of its own for them
        self.replan()
        if any(known.choice == choice and not known.stitched for known in self._known):
            return False
        known = Known(course, uses, step.names, step.blocks, step.profile, choice=choice, stitched=True)
        self._take(known)
        return True

    def _take(self, known: Known) -> None:
        others = [each for each in self._known if not (each.stitched and each.choice == known.choice)]
        self._known = [*others[1 - _KEPT :], known]

    @property
    def link(self) -> Link:
        return self.rates.link

    @property
    def basis(self) -> tuple[float, ...]:
        """The rates and sizes that decide how layers are treated best."""
        states = self.states
        link, sizes = self.link, (self.budget, states.total, *states.crossing(0))
        little = 0.0 if link.room is None else 1 / (1 + link.room)  # comparable, as endless room is not
        return link.out, link.back, little, *map(float, sizes)

    @staticmethod
    def nearby(ratio: float, more: int) -> Variant:
        """The variant of a step that is so much longer, and begins when so many bytes more are taken."""
        return Variant(ceil(ratio * _GRID) / _GRID, more)

    def waits(self, known: Known, variant: Variant) -> float:
        """The seconds by which a step is longer than if all were on the device that can be, states too.

        It is as good as endless where there is no room for all that has to leave.
        """
        table = self.table(known, variant)
        if self.link.room is not None and table.plan.below > self.link.room:
            return inf
        return table.plan.waits + (self.beside(table.profile).seconds if self.states.total else 0.0)

    def table(self, known: Known, variant: Variant = _RECORDED, *, strict: bool = False) -> Table:
        """What to answer in a step. strict: raises BudgetTooSmall, in place of a plan with the least possible."""
        if (crossing := self.states.crossing(0)) != self._crossing:
            self._crossing = crossing
            self.replan()
        if self.states.total and (self.states.target is None or not self.states.fit(self.room)):
            self.states.target = None
            self.replan()
        if variant.more < 0 and self.apart(variant.more):
            variant = variant._replace(more=0)  # what is not there when it begins may come in the midst of it
        made = known.tables.get(variant)
        if made is None:
            profile = known.profile if variant == _RECORDED else known.profile.scaled(*variant)
            try:
                first = self._plan(profile, spare=self.room // TRIED if known.stitched else 0)
            except BudgetTooSmall as error:
                # In no variable: an error that is raised here would keep all that is under way, and itself.
                if strict:
                    raise explained(error, profile, known.names, self.states) from None
                if variant.ratio <= self._told / 2 and not self.apart(variant.more):  # not for each of many sizes
                    self._told = variant.ratio
                    _log.warning(
                        "a step of %.2f times the recorded size, or of more, may take more than the budget: %s",
                        *(variant.ratio, explained(error, profile, known.names, self.states)),
                    )
                self.states.target = 0
                first = plan(profile, error.floor, replace(self.beside(profile).link, room=None))
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
        seen, known_now = recording.profile([0.0] * len(names))[0], known.profile.scaled(*variant)
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

    def recorded(self, choice: Choice) -> Known | None:
        """The kind of steps with this treatment that was used last, if its times can be gone by."""
        sure = (each for each in reversed(self._known) if not (each.stitched or each.guessed))
        return next((known for known in sure if known.choice == choice), None)

    def same(self, recording: Recording, choice: Choice) -> bool:
        """Whether a recording is of a kind of steps that is known, with the same events and sizes.

        choice: how its layers were to be treated. Where some cannot be, steps with different ones are alike.
        """
        this = choice, [life.nbytes for life in recording.blocks.values()], recording.names
        alike = [known for known in self._known if (known.choice, known.sizes, known.names) == this]
        return any(not (known.stitched or self.apart(recording.standing[0] - known.standing)) for known in alike)

    def found_full(self, away: int) -> None:
        """In a step there was no room for more than so many bytes of blocks beside the device."""
        self._held = self._host
        if self.rates.found_full(away):
            self.replan()

    def see_host(self) -> bool:
        """Whether the host tier holds more than when it was found full. How much shows when it is again."""
        held = self._held
        if self.link.room is None or held is None or ((now := self._host) is not None and now <= held):
            return False
        return self.rates.found_full(None)

    @property
    def _host(self) -> int | None:
        return self._host_bytes() if callable(self._host_bytes) else self._host_bytes

    def states_moved(self) -> None:
        """Optimizer states are elsewhere now: the times that are known are not to go by for long."""
        self.rates.found_full(None)
        for known in self._known:
            known.guessed = True

    def forget(self) -> None:
        """No step that comes is like those that are known."""
        self._known.clear()

    def drift(self, known: Known, variant: Variant, seconds: Sequence[float]) -> None:
        """Plans a kind of steps anew, by the seconds of one of this variant, if that changes the prediction."""
        tables, profile = known.tables, known.profile
        share = 1.0 if known.guessed else _NEW
        mean = [
            (1 - share) * old + share * new / variant.ratio
            for old, new in zip(profile.seconds, seconds, strict=True)
        ]
        known.profile = replace(profile, seconds=mean)
        known.guessed = False
        known.tables = {}
        made = self.table(known, variant)
        before = tables[variant].plan.seconds if variant in tables else 0.0
        if abs(made.plan.seconds - before) <= _CHANGE * before:
            known.tables = tables
        else:
            for other in self._known:
                if other is not known:
                    other.tables.clear()

    def replan(self, budget: int | None = None, margin: int | None = None, reserve: int | None = None) -> None:
        """Plans are made anew, for this budget, margin and reserve if they are told.

        reserve: bytes that plans leave free beside the margin, but where they are needed whatever leaves.
        """
        self.budget = self.budget if budget is None else budget
        self._margin = self._margin if margin is None else margin
        self._reserve = self._reserve if reserve is None else reserve
        for known in self._known:
            known.tables.clear()

    def _plan(self, profile: Profile, spare: int) -> Plan:
        """spare: bytes to leave free where there is a plan without them. What nobody has measured may take more.

        Where there is none, moments that need them whatever leaves have them, and the reserve. Where that is too
        little, half of what no plan needs is left free.
        """
        states = self.states
        if states.total and states.target != 0:
            keep = self._to_keep(profile)
            if states.target is None or keep < states.target:
                states.target = keep
                self.replan()
        link = self.beside(profile).link
        try:
            return self._sparing(profile, spare, link)
        except BudgetTooSmall:
            if link.room is None:
                raise
        # What finds no room stays where it is, whatever is planned.
        return self._sparing(profile, spare, replace(link, room=None))

    def _sparing(self, profile: Profile, spare: int, link: Link) -> Plan:
        planned = self.states.planned
        room = self.room - planned - spare
        eased = profile.eased(room, self.most - planned)
        try:
            made = self._within(eased, room, link)
            return made if eased is profile else replace(made, peak=floor(profile.moments))
        except BudgetTooSmall as error:
            if self.budget - planned == room:
                raise
            least, budget = error.floor, self.budget - planned
        return self._within(profile, budget - max(0, budget - least) // 2, link)

    @property
    def room(self) -> int:
        """The budget for plans, where they can do without the margin and the reserve."""
        return self.most - self._reserve

    @property
    def most(self) -> int:
        """The same where the reserve is needed whatever leaves."""
        return self.budget - self._margin

    def _to_keep(self, profile: Profile) -> int:
        try:
            return states_to_keep(profile, self.room, self.link, self.states)[0]
        except BudgetTooSmall:
            return 0  # what such a step needs it needs for blocks

    def beside(self, profile: Profile) -> Beside:
        """What optimizer states leave of the link in a step."""
        return self.states.beside(self.link, profile, self.room, self.states.planned)

    def _within(self, profile: Profile, budget: int, link: Link) -> Plan:
        if self._slowdown is None:
            made = plan(profile, budget, link)
        else:
            made = least_memory(profile, budget, link, self._slowdown)
        _, in_backward = self.states.crossing(self.states.planned)
        return paced(profile, made, link) if in_backward else made

    def _disk(self, profile: Profile, first: Plan) -> DiskPlan | None:
        if self.link.drive is None:
            return None
        host_bytes = self._host
        if host_bytes is None:
            return None
        try:
            return plan_disk(profile, first, host_bytes, self.beside(profile).link, self.link.drive)
        except BudgetTooSmall as error:
            _log.info("what is spilled is decided when the host is full: %s", str(error))
            return None


def _spread(ratios: Sequence[float]) -> float:
    """How far ratios are apart; less than one in a hundred does not count."""
    spread = max(ratios, default=1.0) / max(min(ratios, default=1.0), 1e-9) - 1
    return spread if spread >= 0.01 else 0.0

"""The steps that are known, and for each the plan it has, as answers to events."""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import ceil, inf
from typing import NamedTuple

from ..base import Action, Fetch, Offload, Release, Reload, Spill
from .disk_and_states import StatesShare, explained, plan_disk, states_to_keep
from .planner import least_memory, plan
from .profile import BudgetTooSmall, DiskPlan, Link, Plan, Profile
from .recording import Name, Recording, Script, StepNames
from .stitching import Choice, RecordedStep

_log = logging.getLogger("tiered_mem.policies")
_KEPT = 4
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
        self.states = states
        self._known: list[Known] = []  # the one that was used last comes last
        self._told = inf  # from this ratio on it has been said that a step may run out of memory
        self._unplanned_told = False

    def __len__(self) -> int:
        return len(self._known)

    def find(
        self, course: Sequence[Name], sizes: Sequence[int], standing: int, choice: Choice
    ) -> tuple[Known, Variant] | None:
        """The kind of a step that begins like this and whose first blocks have these sizes, and how it differs.

        standing: the bytes that are taken when it begins. choice: how its layers are treated.

        Of several it is the one to which all of the sizes have the same ratio, which is no shorter, and was used
        last.
        """
        fitting = [
            known for known in self._known if known.choice == choice and known.course[: len(course)] == course
        ]
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
    ) -> Known | None:
        """Takes a step over, and plans for it.

        seconds: of its positions, or of the last of them, if it began `like` a variant of a known one. choice: how
        its layers were treated.

        Raises BudgetTooSmall for the first step. A later one that the budget is too small for is left out.
        """
        before = len(recording.names) - len(seconds)
        begun = (
            [0.0] * before
            if like is None
            else recording.take_over(before, like.names, like.profile.scaled(*variant))
        )
        profile = recording.profile([*begun, *seconds])
        if self.states.step_peak:
            # The optimizer's step was another one then: with no states yet, or with others on the device.
            profile = profile.ending_below(self.states.step_peak)
        blocks = list(recording.blocks)
        guessed = before > 0 or not self._known
        known = Known(
            recording.course, recording.uses, recording.names, blocks, profile, guessed=guessed, choice=choice
        )
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
            return None
        self._take(known)
        return known

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
    def basis(self) -> tuple[float, ...]:
        """The rates and sizes that decide how layers are treated best."""
        return self.link.out, self.link.back, float(self.budget), float(self.states.total)

    @staticmethod
    def nearby(ratio: float, more: int) -> Variant:
        """The variant of a step that is so much longer, and begins when so many bytes more are taken."""
        return Variant(ceil(ratio * _GRID) / _GRID, more)

    def waits(self, known: Known, variant: Variant) -> float:
        """The seconds by which a step is longer than if all were on the device, optimizer states too."""
        states = self.states
        crossing = self.link.exchange(states.total - states.planned) if states.total else 0.0
        return self.table(known, variant).plan.waits + crossing

    def table(self, known: Known, variant: Variant = _RECORDED, *, strict: bool = False) -> Table:
        """What to answer in a step. strict: raises BudgetTooSmall, in place of a plan with the least possible."""
        if self.states.total and (self.states.target is None or not self.states.fit(self.room)):
            self.states.target = None
            self.replan()
        made = known.tables.get(variant)
        if made is None:
            profile = known.profile if variant == _RECORDED else known.profile.scaled(*variant)
            try:
                first = self._plan(profile, spare=self.room // TRIED if known.stitched else 0)
            except BudgetTooSmall as error:
                # In no variable: an error that is raised here would keep all that is under way, and itself.
                if strict:
                    raise explained(error, profile, known.names, self.states) from None
                if variant.ratio <= self._told / 2:  # not for each of many sizes
                    self._told = variant.ratio
                    _log.warning(
                        "a step of %.2f times the recorded size, or of more, may take more than the budget: %s",
                        *(variant.ratio, explained(error, profile, known.names, self.states)),
                    )
                self.states.target = 0
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
            if not known.stitched and known.names == recording.names and known.profile.nbytes == sizes:
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

    def _plan(self, profile: Profile, spare: int) -> Plan:
        """spare: bytes to leave free where there is a plan without them. What nobody has measured may take more."""
        states = self.states
        if states.total and states.target != 0:
            keep = self._to_keep(profile)
            if states.target is None or keep < states.target:
                states.target = keep
                self.replan()
        try:
            return self._within(profile, self.room - states.planned - spare)
        except BudgetTooSmall:
            if not self._margin and not spare:
                raise
        return self._within(profile, self.budget - states.planned)

    @property
    def room(self) -> int:
        """The budget for plans that can do without the margin."""
        return self.budget - self._margin

    def _to_keep(self, profile: Profile) -> int:
        try:
            return states_to_keep(profile, self.room, self.link, self.states)[0]
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


def _spread(ratios: Sequence[float]) -> float:
    """How far ratios are apart; less than one in a hundred does not count."""
    spread = max(ratios, default=1.0) / max(min(ratios, default=1.0), 1e-9) - 1
    return spread if spread >= 0.01 else 0.0


Step = tuple[type[Action], Name]


@dataclass(eq=False)
class Table:
    """What to answer at each event of a step, by the events' names.

    returns: the blocks that leave, in the order in which they come back. script,
    recording: of a step that was played by it.
    """

    profile: Profile
    plan: Plan
    disk: DiskPlan | None
    names: Sequence[Name]
    blocks: Sequence[Name]
    returns: Sequence[Name] = field(init=False)
    script: Script | None = field(default=None, init=False)
    recording: Recording | None = field(default=None, init=False)
    _place: dict[Name, int] = field(init=False)
    _number: dict[Name, int] = field(init=False)
    # The bytes of the step's blocks and of all at each position, and of all from each block's reload to its use at
    # most.
    _own: Sequence[int] = field(init=False)
    _memory: Sequence[int] = field(init=False)
    _highest: Sequence[int] = field(init=False)
    _reload: Mapping[int, int] = field(init=False)
    _steps: dict[Name, list[Step]] = field(init=False)
    _position: dict[Name, int] = field(init=False)

    def __post_init__(self) -> None:
        steps: defaultdict[Name, list[Step]] = defaultdict(list)
        profile, plan = self.profile, self.plan
        offload = profile.saved if self.disk is None else self.disk.offload
        reload = plan.reload if self.disk is None else self.disk.reload
        in_order = sorted(reload, key=lambda b: (reload[b], profile.used[b]))
        for b in sorted(plan.release):
            steps[self.names[offload[b]]].append((Offload, self.blocks[b]))
        if self.disk is not None:
            for b in sorted(self.disk.spill):
                steps[self.names[offload[b]]].append((Spill, self.blocks[b]))
        for b in sorted(plan.release, key=plan.release.__getitem__):
            steps[self.names[plan.release[b]]].append((Release, self.blocks[b]))
        if self.disk is not None:
            for b, k in sorted(self.disk.fetch.items(), key=lambda item: reload[item[0]]):
                steps[self.names[k]].append((Fetch, self.blocks[b]))
        for b in in_order:
            if reload[b] < profile.dropped[b]:
                steps[self.names[reload[b]]].append((Reload, self.blocks[b]))
        change = [0] * (len(profile.seconds) + 1)
        for b, nbytes in enumerate(profile.nbytes):
            change[profile.saved[b]] += nbytes
            change[profile.dropped[b]] -= nbytes
            if b in plan.release:
                change[plan.release[b]] -= nbytes
                change[reload[b]] += nbytes
        own = list(accumulate(change))
        self._own, self._memory = own, [*map(int.__add__, own, profile.unmovable), 0]
        last = accumulate((profile.used[b] for b in in_order), max)
        windows = zip((reload[b] for b in in_order), last, strict=True)
        self._highest = _maxima(self._memory, windows)
        self._reload = reload
        self.returns = [self.blocks[b] for b in in_order]
        self._place = {block: i for i, block in enumerate(self.returns)}
        self._number = {block: b for b, block in enumerate(self.blocks)}
        self._steps = dict(steps)
        self._position = {name: k for k, name in enumerate(self.names)}

    def actions(self, event: Name, names: StepNames) -> list[Action]:
        """The actions at an event, about the blocks of this step that are alive or were."""
        steps = self._steps.get(event, ())
        return [kind(key) for kind, block in steps if (key := names.key(block)) is not None]

    def place(self, block: Name | None) -> int:
        """Where it stands among `returns`; what does not leave by the plan comes last."""
        return len(self.returns) if block is None else self._place.get(block, len(self.returns))

    def use(self, block: Name | None, after: Name) -> float:
        """The position of a block's next use after an event; infinite where the plan has none.

        Of uses beyond the first it knows only that they come before the block's end: it may be at once.
        """
        b = None if block is None else self._number.get(block)
        if b is None:
            return inf
        use, end, now = self.profile.used[b], self.profile.dropped[b], self._position.get(after, 0)
        return max(use, now) if max(use, now) < end else inf

    def following(self, block: Name | None, count: int) -> Sequence[Name]:
        """The next to come back after a block."""
        first = self.place(block) + 1
        return self.returns[first : first + count]

    def knows(self, event: Name) -> bool:
        """Whether an event is one of the plan's."""
        return event in self._position

    def beside(self, event: Name, others: int) -> int:
        """The bytes beside blocks until the next event, where there are `others` now.

        It is as much more than in the plan as it is now; for an event without a plan it stays as it is.
        """
        k = self._position.get(event)
        return others if k is None else max(others, self.profile.unmovable[k] + self._more(k, others))

    def needed(self, event: Name, others: int, block: Name | None, own: int) -> int:
        """The most bytes of the device until the use of a block, if its reload is due and begins now.

        own: the bytes of the step's blocks on the device, with this one; others: all else, at the event.
        """
        k = self._position.get(event)
        b = None if block is None else self._number.get(block)
        if k is None or b is None:
            return own + others
        # What is later than planned, or was not to leave, must only fit from here on.
        on_time = b in self._reload and k <= self._reload[b]
        until = self.profile.used[b] + 1
        highest = self._highest[self.place(block)] if on_time else max(self._memory[k:until], default=0)
        return max(own + others, highest + own - self._own[k] + self._more(k, others))

    def _more(self, k: int, others: int) -> int:
        return others - (self.profile.standing[k] if self.profile.standing else 0)


def _maxima(values: Sequence[int], windows: Iterable[tuple[int, int]]) -> list[int]:
    """The highest value from the first place to the second of each window. Both places never fall."""
    found = []
    highest: deque[int] = deque()  # places of falling values
    seen = 0
    for first, last in windows:
        for place in range(max(seen, first), last + 1):
            while highest and values[highest[-1]] <= values[place]:
                highest.pop()
            highest.append(place)
        seen = max(seen, last + 1)
        while highest[0] < first:
            highest.popleft()
        found.append(values[highest[0]])
    return found

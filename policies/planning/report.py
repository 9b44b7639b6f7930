"""What plans promise and what came of them, and what is said of steps above the budget."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from math import fsum
from typing import Any

from ...sizes import format_bytes, format_seconds
from ..base import StepMeasured
from .advice import Adviser, LayerStall, Stalls, moved
from .disk_and_states import StatesShare
from .profile import Link, Profile, least_seconds
from .recording import Name
from .repertoire import Repertoire
from .step import StepUnderWay
from .stitching import RecordedStep, Way, Ways
from .table import Table
from .treated import Treated, Treatment, Tried

_SHOWN = 5
_TRYING = "steps in which layers are computed again; after these it is chosen what is done with each layer"
# Without a plan a peak is that of so many steps.
_LATELY = 4
# Lengths that differ by less are the same.
_ALIKE = 0.01


@dataclass(frozen=True)
class Report:
    """A step as planned, and as it was. Memory in bytes, times in seconds.

    It is of the last step that went by a plan, and of all like it since optimizer states were moved. Where none has
    yet, or the policy makes no plans, `missing` says so, and what is not known is None.

    missing: why there is no plan; empty where there is one.
    step: the number of the step that was measured; None where none like it has been, and then all times that are
        measured are None.
    budget: what all memory of the device was to stay below.
    planned_peak, measured_peak: the most, with all that comes before and after the backward, the optimizer's step
        among it. Measured is the most of the last four steps like it; without a plan, of the last four. Where
        nobody resets torch's peak, what stays below the most that ever was is known at events only.
    compute: the step without any waits. planned, measured: with them. least: a time that no plan within the budget
        can better, with layers treated as they are.
    moved: bytes that go to the host in a step, and come back. planned_hidden, measured_hidden: the share of the
        copies' time that compute does not wait for, from 0 to 1; None where nothing moves.
    steps_over: how many steps took more than the budget until now. most_over: what the fullest of them took.
    states_kept: of the optimizer states that may, the bytes that stay on the device. states_beside_forward,
        states_beside_backward: the bytes of others that come back to the device and leave it again in forward, and
        in backward.
    treatments: how the layers are treated, those that keep all first; empty where nothing else was tried.
    trying: how else layers can be treated is being tried in these steps.
    stalls: the layers that wait for copies, the longest first.
    advice: at most three sentences.
    moved_until_now, stayed_until_now: bytes that were copied to the host since the manager was made, and those of
        saved tensors that no policy could move, by the reason, in words.
    """

    missing: str = ""
    step: int | None = None
    budget: int | None = None
    planned_peak: int | None = None
    measured_peak: int | None = None
    compute: float | None = None
    planned: float | None = None
    measured: float | None = None
    least: float | None = None
    moved: int | None = None
    planned_hidden: float | None = None
    measured_hidden: float | None = None
    steps_over: int = 0
    most_over: int = 0
    states_kept: int = 0
    states_beside_forward: int = 0
    states_beside_backward: int = 0
    treatments: tuple[Treatment, ...] = ()
    trying: bool = False
    stalls: tuple[LayerStall, ...] = ()
    advice: tuple[str, ...] = ()
    moved_until_now: int = 0
    stayed_until_now: Mapping[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """All of it in dicts, lists, numbers and strings, as for JSON."""
        return asdict(self) | {
            "treatments": [asdict(each) | {"layers": list(each.layers)} for each in self.treatments],
            "stalls": [asdict(stall) for stall in self.stalls],
            "advice": list(self.advice),
        }

    def __str__(self) -> str:
        return "\n".join(f"{label:<8} {value}" for label, value in self.rows())

    def rows(self) -> list[tuple[str, str]]:
        """It for people, as labels and values. A label is empty where the one before it goes on; advice is last."""
        rows = self._planned_rows() if not self.missing else [("no plan", self.missing)]
        if self.missing and self.budget is not None:
            rows.append(("budget", format_bytes(self.budget)))
        if self.missing and self.measured_peak is not None:
            rows.append(("peak", f"{format_bytes(self.measured_peak)} measured"))
        if self.trying:
            rows.append(("trying", _TRYING))
        if self.missing:
            rows.append(("moved", f"{format_bytes(self.moved_until_now)} to the host until now"))
        stayed = sorted(self.stayed_until_now.items(), key=lambda each: each[1], reverse=True)
        if self.missing and stayed:
            told = "; ".join(f"{format_bytes(nbytes)} {why}" for why, nbytes in stayed)
            rows.append(("stayed", f"{told}"))
        if self.steps_over:
            steps = "one step" if self.steps_over == 1 else f"{self.steps_over} steps"
            most = format_bytes(self.most_over)
            rows.append(("over", f"{steps} until now took more than the budget, {most} at most"))
        return rows + [("advice" if not i else "", text) for i, text in enumerate(self.advice)]

    def _planned_rows(self) -> list[tuple[str, str]]:
        step = f"{_time(self.planned)} planned"
        peak = f"{_size(self.planned_peak)} planned"
        hidden = "nothing moves" if self.planned_hidden is None else f"{100 * self.planned_hidden:.0f} % hidden"
        if self.measured_peak is not None:
            peak += f", {format_bytes(self.measured_peak)} measured"
        if self.states_kept:
            peak += f", of which {format_bytes(self.states_kept)} are optimizer states"
        if self.measured is not None:
            step += f", {format_seconds(self.measured)} measured (step {self.step})"
        if self.measured_hidden is not None:
            hidden += f" as planned, {100 * self.measured_hidden:.0f} % as measured"
        so = " with its layers treated so" if any(each.how for each in self.treatments) else ""
        rows = [
            ("budget", _size(self.budget)),
            ("peak", peak),
            ("step", f"{step}; no plan{so} is below {_time(self.least)}"),
            ("compute", _time(self.compute)),
            ("copies", f"{_size(self.moved)} each way, {hidden}" if self.moved else hidden),
        ]
        beside = (("forward", self.states_beside_forward), ("backward", self.states_beside_backward))
        if parts := [f"{format_bytes(nbytes)} each way beside {part}" for part, nbytes in beside if nbytes]:
            rows.append(("states", ", ".join(parts)))
        rows += [("layers" if not i else "", str(each)) for i, each in enumerate(self.treatments)]
        rows += [("waits" if not i else "", str(stall)) for i, stall in enumerate(self.stalls[:_SHOWN])]
        if len(self.stalls) > _SHOWN:
            left = self.stalls[_SHOWN:]
            rest = format_seconds(fsum(stall.seconds for stall in left))
            rows.append(("", f"{len(left)} more, {rest} planned"))
        return rows


class Account:
    """Keeps what became of planned steps, for a report on the last one.

    given: the budget that was named. states: optimizer states that have a part of it. tried: tells how
    layers can be treated; None where nothing may be computed again.
    """

    def __init__(
        self, repertoire: Repertoire, given: int, states: StatesShare, tried: Callable[[], Tried] | None
    ) -> None:
        self._repertoire = repertoire
        self._given = given
        self._states = states
        self._recompute = tried is not None
        self._tried = tried or (lambda: Tried(None, False, False))
        self._first: int | None = None  # bytes beside blocks when the first step began
        self._last: StepUnderWay | None = None  # that went by a plan
        self._peaks: deque[int] = deque(maxlen=_LATELY)  # of it and those like it before
        self._measured: tuple[StepUnderWay, StepMeasured] | None = None
        self._unplanned: deque[int] = deque(maxlen=_LATELY)  # the peaks of steps without a plan
        self._recorded: tuple[Profile, Sequence[Name]] | None = None

    def states_moved(self) -> None:
        """Steps are others from now on."""
        self._last = self._measured = None

    def ended(self, step: StepUnderWay) -> None:
        standing = step.recording.standing
        if self._first is None and standing:
            self._first = standing[0]
        if step.table is None:
            self._unplanned.append(step.peak)
        elif not step.deviates:
            alike = self._last is not None and _alike(self._last, step)
            if not alike:
                self._peaks.clear()
            self._peaks.append(step.peak)
            self._last = step
            if self._measured is not None and not _alike(self._measured[0], step):
                self._measured = None

    def measured(self, step: StepUnderWay, event: StepMeasured) -> None:
        """A step that has ended was measured."""
        whole = len(event.seconds) == len(step.recording.names)
        if step.table is not None and not step.deviates:
            if whole and self._last is not None and _alike(self._last, step):
                self._measured = step, event
        elif step.recording.regular and whole:
            self._recorded = step.recording.profile(event.seconds)[0], step.recording.names

    def step(self) -> tuple[Profile, Sequence[Name], Link]:
        """The step that plans are for, its positions, and the link. Raises RuntimeError before one was measured."""
        if self._last is not None and self._last.table is not None:
            return self._now(self._last, self._last.table), self._last.table.names, self._repertoire.link
        if self._recorded is None:
            raise RuntimeError("no step has been measured yet that a plan can be made from")
        return *self._recorded, self._repertoire.link

    @property
    def undecided(self) -> bool:
        """Whether it is still to be tried how layers are treated best."""
        return self._tried().undecided

    @property
    def ways(self) -> Ways | None:
        """The step that plans are for in each way in which all its layers can be treated; None where that is not
        known."""
        if self._last is None or self._last.table is None:
            return None
        return self._ways_of(self._last, self._last.table, self._now(self._last, self._last.table))

    def _ways_of(self, step: StepUnderWay, table: Table, now: Profile) -> Ways | None:
        ways = self._tried().ways
        current = RecordedStep(table.names, table.blocks, now)
        if ways is None or current.layers != ways.layers:
            return None
        # As long as it is now, and with what is allocated by now when it begins.
        ratio = sum(now.nbytes) / max(1, sum(ways.stitched(step.choice).profile.nbytes))
        ratio = 1.0 if abs(ratio - 1) < _ALIKE else ratio
        steps: dict[Way, RecordedStep] = {}
        for way, each in ways.steps.items():
            more = now.standing[0] - each.profile.standing[0] if now.standing and each.profile.standing else 0
            steps[way] = replace(each, profile=each.profile.scaled(ratio, more))
        if not step.choice:
            steps[None] = current  # with the times of the last measured
        return Ways(steps)

    def _now(self, step: StepUnderWay, table: Table) -> Profile:
        """The step as it is by now: with what is allocated on the device, and the times of the last measured."""
        profile = table.profile
        if len(step.recording.standing) == len(profile.standing):
            profile = profile.standing_at(step.recording.standing)
        event = None if self._measured is None else self._measured[1]
        if event is not None and len(event.seconds) == len(profile.seconds):
            profile = replace(profile, seconds=list(event.seconds))
        return profile

    def report(self) -> Report:
        """It takes up to a second."""
        if self._last is None or self._last.table is None:
            peak = max(self._unplanned, default=None)
            trying = self._tried().trying
            return Report(missing=self._missing(), budget=self._given, measured_peak=peak, trying=trying)
        step, table, link = self._last, self._last.table, self._repertoire.link
        plan, profile, kept = table.plan, self._now(step, table), self._states.kept
        measured, event = self._measured or (None, None)
        returning = sum(profile.nbytes[b] for b, k in plan.reload.items() if k < profile.dropped[b])

        def hidden(waits: float, out: float, back: float) -> float | None:
            copies = moved(profile, plan) / (out or link.out) + returning / (back or link.back)
            return min(1.0, max(0.0, 1 - waits / copies)) if copies > 0 else None

        compute = profile.compute
        in_forward, in_backward = self._states.crossing(kept)
        beside = self._states.beside(link, profile, self._repertoire.budget, kept)
        planned = compute + plan.waits + beside.late
        took = None if event is None else compute + event.stalls
        fastest = replace(link, out=max(link.out, event.out), back=max(link.back, event.back)) if event else link
        bound = least_seconds(profile.moments, self._repertoire.budget - kept, fastest)
        standing = step.recording.standing
        grown = standing[0] - self._first if standing and self._first is not None else 0
        ways, trying = self._ways_of(step, table, profile), self._tried().trying
        treatments: tuple[Treatment, ...] = ()
        if ways is not None and not trying:
            treatments = Treated(ways, step.choice, self._repertoire.budget, link, self._states).treatments()
        return Report(
            step=None if measured is None else measured.number,
            budget=self._given,
            planned_peak=max(plan.peak, self._states.step_peak) + kept,
            measured_peak=max(self._peaks),
            compute=compute,
            planned=planned,
            measured=took,
            least=min(bound, planned, planned if took is None else took),
            moved=moved(profile, plan),
            planned_hidden=hidden(plan.waits, 0, 0),
            measured_hidden=None if event is None else hidden(event.stalls - event.states, event.out, event.back),
            states_kept=kept,
            states_beside_forward=in_forward,
            states_beside_backward=in_backward,
            treatments=treatments,
            trying=trying,
            stalls=Stalls(profile, plan, table.names, table.blocks, beside.link).by_layer(
                event.waits if event else (), measured.recording.names if measured else ()
            ),
            advice=Adviser(
                profile,
                table.names,
                table.blocks,
                self._repertoire.budget,
                link,
                grown=grown,
                disk=table.disk,
                states=self._states,
                recompute=self._recompute,
                ways=ways,
                choice=step.choice,
            ).advice(),
        )

    def _missing(self) -> str:
        if self._repertoire:
            return "the last steps are not like one that was recorded, or optimizer states have just been moved"
        if self._recorded is None and self._unplanned:
            return "no step could be recorded that a plan can be made from: each is kept to the budget as it comes"
        return "the first step is recorded, and the next one like it goes by a plan"


def _alike(one: StepUnderWay, other: StepUnderWay) -> bool:
    return one.known is other.known and one.variant.ratio == other.variant.ratio


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(seconds)


def _size(nbytes: int | None) -> str:
    return "-" if nbytes is None else format_bytes(nbytes)


_log = logging.getLogger("tiered_mem.policies")


class OverrunCause(Enum):
    """When a step took the most, and why no plan has kept it from that."""

    AFTER = "after the last use of what was saved, as a rule in the optimizer's step or an evaluation"
    SMALL = "tensors below min_bytes filled it, which has fallen by itself: more moves from the next step on"
    NOTHING = "nothing that it saved for backward could move"
    UNFINISHED = "backward did not use most of what was saved, and no plan can be made from that"
    NEW = "no step like it was known"
    PLANNED = "it took more than the step that its plan was made for"


# Beside a larger budget, which always helps.
_HELPS: dict[OverrunCause, str] = {
    OverrunCause.AFTER: "evaluations in smaller batches, and with no_grad()",
    OverrunCause.SMALL: "nothing, if it is the last time; a smaller min_bytes from the beginning",
    OverrunCause.NOTHING: "checkpoints, or smaller batches",
    OverrunCause.UNFINISHED: "forwards without a backward under no_grad(); smaller batches",
    OverrunCause.NEW: "nothing, if steps like it follow: they go by a plan",
    OverrunCause.PLANNED: "nothing, if it is the last time: plans leave as much more free now",
}


@dataclass(frozen=True)
class Overrun:
    """A step that took more than the budget. In bytes.

    step: its number. peak: the most that was allocated. budget: what should have been. blocks: of the peak, those
    in blocks, which can move, but for some that are in use. stayed: what else its layers saved, by the reason for
    which it cannot, in words. registered: an optimizer is. without_room: of the blocks, those that found no room on
    the host.
    """

    step: int
    peak: int
    budget: int
    cause: OverrunCause
    blocks: int
    stayed: Mapping[str, int]
    registered: bool = False
    without_room: int = 0

    def __str__(self) -> str:
        largest = sorted(self.stayed.items(), key=lambda each: each[1], reverse=True)
        told = "".join(f"; its layers saved {format_bytes(nbytes)} {why}" for why, nbytes in largest[:2])
        peak, over, rest = map(format_bytes, (self.peak, self.peak - self.budget, self.peak - self.blocks))
        helps = _HELPS[self.cause]
        if self.cause is OverrunCause.AFTER:
            helps += f"; {'smaller bucket_bytes' if self.registered else 'register_optimizer()'}"
        if self.without_room:
            told = f"; {format_bytes(self.without_room)} of the blocks found no room on the host{told}"
            helps = "a larger host_bytes, or a spill_dir"
        return (
            f"step {self.step} took {peak} of the device, {over} more than the budget of "
            f"{format_bytes(self.budget)}: {self.cause.value}. {format_bytes(self.blocks)} of it were in blocks, "
            f"which can move, and {rest} were not{told}. What helps: {over} of budget more; {helps}"
        )


@dataclass
class Overruns:
    """Those of one policy. Each cause is said once, and again where a step takes twice as much beyond the budget.

    steps: how many there were. most: the bytes that the fullest of them took.
    """

    steps: int = 0
    most: int = 0
    _said: dict[OverrunCause, int] = field(default_factory=dict)

    def see(self, overrun: Overrun) -> None:
        self.steps += 1
        self.most = max(self.most, overrun.peak)
        over = overrun.peak - overrun.budget
        if over >= 2 * self._said.get(overrun.cause, 0):
            self._said[overrun.cause] = over
            _log.warning("%s. For this cause it is said again where it is twice as much; report() counts", overrun)

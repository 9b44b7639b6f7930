"""What a plan promises, what came of it, and what would help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...sizes import format_bytes, format_seconds
from ..base import StepMeasured
from .advice import Adviser, moved
from .link import Link
from .names import Name
from .profile import Profile
from .repertoire import Repertoire
from .stalls import LayerStall, Stalls
from .step import StepUnderWay
from .table import Table

_SHOWN = 5


@dataclass(frozen=True)
class Report:
    """One kind of step: as planned, and as it was. Memory in bytes, times in seconds.

    step: the number of the step that was measured; None where none has been yet, and then all that is measured is
        None.
    budget: what all memory of the device was to stay below. measured_peak: the most in any step with a plan.
    compute: the step without any waits. planned, measured: with them. least: a time that no plan within the budget
        can better.
    moved: bytes that go to the host in a step, and come back. planned_hidden, measured_hidden: the share of the
        copies' time that compute does not wait for, from 0 to 1; None where nothing moves.
    stalls: the layers that wait for copies, the longest first.
    advice: at most three sentences.
    """

    step: int | None
    budget: int
    planned_peak: int
    measured_peak: int | None
    compute: float
    planned: float
    measured: float | None
    least: float
    moved: int
    planned_hidden: float | None
    measured_hidden: float | None
    stalls: tuple[LayerStall, ...]
    advice: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """All of it in dicts, lists, numbers and strings, as for JSON."""
        return asdict(self) | {"stalls": [asdict(stall) for stall in self.stalls], "advice": list(self.advice)}

    def __str__(self) -> str:
        step = f"{format_seconds(self.planned)} planned"
        peak = f"{format_bytes(self.planned_peak)} planned"
        hidden = "nothing moves" if self.planned_hidden is None else f"{100 * self.planned_hidden:.0f} % hidden"
        if self.measured_peak is not None:
            peak += f", {format_bytes(self.measured_peak)} measured"
        if self.measured is not None:
            step += f", {format_seconds(self.measured)} measured (step {self.step})"
        if self.measured_hidden is not None:
            hidden += f" as planned, {100 * self.measured_hidden:.0f} % as measured"
        rows = [
            ("budget", format_bytes(self.budget)),
            ("peak", peak),
            ("step", f"{step}; no plan is below {format_seconds(self.least)}"),
            ("compute", format_seconds(self.compute)),
            ("copies", f"{format_bytes(self.moved)} each way, {hidden}" if self.moved else hidden),
        ]
        rows += [("waits" if not i else "", str(stall)) for i, stall in enumerate(self.stalls[:_SHOWN])]
        if len(self.stalls) > _SHOWN:
            left = self.stalls[_SHOWN:]
            rest = format_seconds(sum(stall.seconds for stall in left))
            rows.append(("", f"{len(left)} more, {rest} planned"))
        rows += [("advice" if not i else "", text) for i, text in enumerate(self.advice)]
        return "\n".join(f"{label:<8} {value}" for label, value in rows)


class Account:
    """Keeps what became of planned steps, for a report on the last one that was measured."""

    def __init__(self, repertoire: Repertoire) -> None:
        self._repertoire = repertoire
        self._first: int | None = None  # bytes beside blocks when the first step began
        self._standing: Sequence[int] = ()
        self._peak: int | None = None
        self._table: Table | None = None
        self._measured: tuple[StepUnderWay, StepMeasured] | None = None
        self._recorded: tuple[Profile, Sequence[Name]] | None = None

    def chosen(self, table: Table) -> None:
        """A step goes by this plan from now on."""
        if self._measured is None:
            self._table = table

    def ended(self, step: StepUnderWay) -> None:
        standing = step.recording.standing
        if self._first is None and standing:
            self._first = standing[0]
        if step.table is not None:
            self._standing = standing
            self._peak = max(step.peak, self._peak or 0)

    def measured(self, step: StepUnderWay, event: StepMeasured) -> None:
        """A step that has ended was measured."""
        if step.table is not None and not step.deviates:
            self._table, self._measured = step.table, (step, event)
        elif self._table is None and step.recording.regular and len(event.seconds) == len(step.recording.names):
            self._recorded = step.recording.profile(event.seconds), step.recording.names

    def step(self) -> tuple[Profile, Sequence[Name], Link]:
        """The step that plans are for, its positions, and the link. Raises RuntimeError before one was measured."""
        if self._table is None and self._recorded is not None:
            return *self._recorded, self._repertoire.link
        return self._now(self._planned()), self._planned().names, self._repertoire.link

    def _now(self, table: Table) -> Profile:
        """The step with what is allocated on the device by now."""
        alike = len(self._standing) == len(table.profile.standing)
        return table.profile.standing_at(self._standing) if alike else table.profile

    def report(self) -> Report:
        """It takes up to a second. Raises RuntimeError as long as there is no plan."""
        table, budget, link = self._planned(), self._repertoire.budget, self._repertoire.link
        plan, profile = table.plan, table.profile
        step, event = self._measured or (None, None)
        whole = step is not None and event is not None and len(event.seconds) == len(step.recording.names)
        returning = sum(profile.nbytes[b] for b, k in plan.reload.items() if k < profile.dropped[b])

        def hidden(waits: float, out: float, back: float) -> float | None:
            copies = moved(profile, plan) / (out or link.out) + returning / (back or link.back)
            return min(1.0, max(0.0, 1 - waits / copies)) if copies > 0 else None

        grown = self._standing[0] - self._first if self._standing and self._first is not None else 0
        return Report(
            step=None if step is None else step.number,
            budget=budget,
            planned_peak=plan.peak,
            measured_peak=self._peak,
            compute=sum(profile.seconds),
            planned=plan.seconds,
            measured=sum(event.seconds) + event.stalls if event is not None and whole else None,
            least=plan.bound,
            moved=moved(profile, plan),
            planned_hidden=hidden(plan.waits, 0, 0),
            measured_hidden=hidden(event.stalls, event.out, event.back) if event is not None and whole else None,
            stalls=Stalls(profile, plan, table.names, table.blocks, link).by_layer(
                event.waits if event else (), step.recording.names if step else ()
            ),
            advice=Adviser(self._now(table), table.names, table.blocks, budget, link, grown, table.disk).advice(),
        )

    def _planned(self) -> Table:
        if self._table is None:
            raise RuntimeError(
                "there is no plan to report on yet: the first step is recorded, and the next one like it goes by "
                "a plan"
            )
        return self._table

"""A training that is run for a few steps, only to be planned: what `tiered-mem plan` starts."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from .policies import Action, Event, OnRequest, PlannedPolicy, Policy, Report, StepBegin, StepMeasured
from .policies.planning import BudgetTooSmall

# A number of steps, a colon, and the file to write.
VARIABLE = "TIERED_MEM_REHEARSAL"


class RehearsalOver(SystemExit):
    """Ends the script, as sys.exit() would: what it has in `with` and `finally` still runs. Its status is 0."""


class Rehearsal:
    """A policy that does what another one does, measures each step, and ends the script when enough were made.

    steps: so many are made. The exception comes out of the forward that would begin the next one. file: where what
    is known then is written as JSON, also if the script ends by itself, or there is no plan.
    """

    def __init__(self, policy: PlannedPolicy, steps: int, file: Path) -> None:
        self._policy = policy
        self._steps = steps
        self._file = file
        self.gather_bytes = policy.gather_bytes
        self.check = policy.check

    @property
    def asks(self) -> Collection[type[OnRequest]]:
        return {*self._policy.asks, StepMeasured}

    def report(self) -> Report:
        return self._policy.report()

    def decide(self, event: Event) -> Sequence[Action]:
        if isinstance(event, StepBegin) and event.step >= self._steps:
            raise RehearsalOver(0)
        try:
            actions = self._policy.decide(event)
        except BudgetTooSmall as error:
            self._write(problem=str(error))
            raise RehearsalOver(0) from None
        if isinstance(event, StepMeasured):
            with suppress(RuntimeError):  # there is no plan yet
                self._write(report=self.report())
        return actions

    def _write(self, *, problem: str = "", report: Report | None = None) -> None:
        step, names, link = self._policy.account.step()
        found = {
            "problem": problem,
            "report": None if report is None else report.as_dict(),
            "text": "" if report is None else str(report),
            "step": asdict(step),
            "names": names,
            "link": asdict(link),
        }
        partial = self._file.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(found))
        partial.replace(self._file)  # each process of a training writes it


def rehearsed(policy: PlannedPolicy) -> Policy:
    """The policy, or a rehearsal of it where the environment asks for one."""
    wish = os.environ.get(VARIABLE)
    if wish is None:
        return policy
    steps, _, file = wish.partition(":")
    return Rehearsal(policy, int(steps), Path(file))

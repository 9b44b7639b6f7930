"""A training that is run for a few steps, only to be planned: what `tiered-mem plan` starts."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from .policies import Action, BudgetTooSmall, Event, OnRequest, PlannedPolicy, Report, StepBegin, StepMeasured

# In the environment: a number of steps, the bytes of the budget, and the file to write, with colons between.
VARIABLE = "TIERED_MEM_REHEARSAL"


class RehearsalOver(SystemExit):
    """Ends the script, as sys.exit() would: what it has in `with` and `finally` still runs. Its status is 0."""


class Wish(NamedTuple):
    """What the environment asks for. budget: in place of the device_budget that the script says."""

    steps: int
    budget: int
    file: Path

    @classmethod
    def of_environment(cls) -> Wish | None:
        said = os.environ.get(VARIABLE)
        if said is None:
            return None
        steps, budget, file = said.split(":", 2)
        return cls(int(steps), int(budget), Path(file))


class Rehearsal:
    """A policy that does what another one does, measures each step, and ends the script when enough were made.

    The exception comes out of the forward that would begin the next step. What is known is written to a file as
    JSON before, also if the script ends by itself, or there is no plan.
    """

    def __init__(self, policy: PlannedPolicy, wish: Wish) -> None:
        self._policy = policy
        self._steps, _, self._file = wish
        self.gather_bytes = policy.gather_bytes
        self.check = policy.check
        self.states = policy.states

    @property
    def asks(self) -> Collection[type[OnRequest]]:
        return {*self._policy.asks, StepMeasured}

    @property
    def plans_spills(self) -> bool:
        return self._policy.plans_spills

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

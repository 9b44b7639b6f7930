"""A training that is run for a few steps, only to be planned: what `tiered-mem plan` starts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from .policies import Action, Event, Link, PlannedPolicy
from .policies.base import StepBegin, StepEnd, StepMeasured
from .policies.planning.bound import BudgetTooSmall
from .sizes import format_bytes

# In the environment: a number of steps, the bytes of the budget, and the file to write, with colons between.
VARIABLE = "TIERED_MEM_REHEARSAL"
# So many times the steps that are asked for are made where none of them will do.
MOST = 4


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
        try:
            steps, budget, file = said.split(":", 2)
            return cls(int(steps), int(budget), Path(file))
        except ValueError:
            raise ValueError(
                f"{VARIABLE}={said!r} in the environment is not STEPS:BUDGET:FILE, with the budget in bytes; it is "
                "for `tiered-mem plan` to set"
            ) from None


class Rehearsal(PlannedPolicy):
    """Measures each step, and ends the script when enough were made.

    These are as many as the wish asks for, and then more, up to MOST times as many, until one was measured that
    went by a plan while all optimizer states rested: one in which some come to the device to stay is not as those
    after it. The exception comes out of the forward that would begin the next step.

    What is known is in a file as JSON before, also where the script ends by itself, or there is no plan. `missing`
    is what is not known yet, in words.

    wait: until the device has done what was queued. A program that never asks the device for a number would else
    be steps ahead of what was measured.
    """

    def __init__(self, wish: Wish, wait: Callable[[], None], budget: int, link: Link, **arguments: Any) -> None:
        super().__init__(budget, link, **arguments)
        self.asks = {*self.asks, StepMeasured}
        self._steps, _, self._file = wish
        self._wait = wait
        self._began: tuple[int | None, ...] = ()
        self._rested = False
        self._found: dict[str, Any] = {"steps": 0, "problem": "", "report": None, "text": ""}
        self._write(
            missing="no forward ran in the contexts of its manager: attach the model, or use offload_context"
        )

    def decide(self, event: Event) -> Sequence[Action]:
        if isinstance(event, StepBegin):
            self._step_begins(event.step)
        try:
            actions = super().decide(event)
            self.asks = {*self.asks, StepMeasured}
        except BudgetTooSmall as error:
            self._write(problem=str(error), missing="", **self._step())
            raise RehearsalOver(0) from None
        if isinstance(event, StepEnd):
            self._rested = self._began == self._resting()
            self._wait()
        elif isinstance(event, StepMeasured):
            self._step_measured(event.step)
        return actions

    def _step_begins(self, number: int) -> None:
        if number >= self._steps * (MOST if self._found["missing"] else 1):
            raise RehearsalOver(0)
        self._began = self._resting()
        if number == 0:
            self._write(missing="no step was measured: that is done when the next one begins")
        self._write(steps=number + 1)

    def _step_measured(self, number: int) -> None:
        report = self.report()
        missing = ""
        if not self._rested:
            there, total = format_bytes(self.states.kept), format_bytes(self.states.total)
            missing = f"optimizer states came to the device or left it in all of them: {there} of {total} are there"
        elif report.step != number:
            missing = "no step that goes by a plan was measured: the first is recorded, those like it are planned"
        if self._found["missing"] or not missing:
            self._write(missing=missing, report=report.as_dict(), text=str(report), **self._step())

    def _resting(self) -> tuple[int | None, ...]:
        return self.states.total, self.states.kept, self.states.target

    def _step(self) -> dict[str, Any]:
        """The step that plans are for, if any was measured."""
        try:
            step, names, link = self.account.step()
        except RuntimeError:
            return {}
        return {"step": asdict(step), "names": names, "link": asdict(link), "states": asdict(self.states)}

    def _write(self, **found: Any) -> None:
        self._found |= found
        partial = self._file.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(self._found))
        partial.replace(self._file)  # each process of a training writes it

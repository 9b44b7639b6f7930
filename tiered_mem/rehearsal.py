"""How `tiered-mem plan` asks a training, through its environment, to be run for a few steps and planned."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

# In the environment, with colons between: a number of steps, the bytes of the budget, what the steps are for, and
# the file to write.
VARIABLE = "TIERED_MEM_REHEARSAL"
# So many times the steps that are asked for are made where none of them will do.
MOST = 4
# What the steps are for: to know all of the training, also what its plan can do without; or to try that plan.
RECORD, TRY = "record", "try"


class RehearsalOver(SystemExit):
    """Ends the script, as sys.exit() would: what it has in `with` and `finally` still runs. Its status is 0."""


class Wish(NamedTuple):
    """What the environment asks for. budget: in place of the device_budget that the script says.

    records: each way to treat layers is tried, also where the plan has no need of that.
    """

    steps: int
    budget: int
    file: Path
    records: bool = False

    @classmethod
    def of_environment(cls) -> Wish | None:
        said = os.environ.get(VARIABLE)
        if said is None:
            return None
        try:
            steps, budget, what, file = said.split(":", 3)
            return cls(int(steps), int(budget), Path(file), {RECORD: True, TRY: False}[what])
        except (ValueError, KeyError):
            raise ValueError(
                f"{VARIABLE}={said!r} in the environment is not STEPS:BUDGET:{RECORD}:FILE or "
                f"STEPS:BUDGET:{TRY}:FILE, with the budget in bytes; it is for `tiered-mem plan` to set"
            ) from None

    def said(self) -> str:
        """As the environment has it."""
        return f"{self.steps}:{self.budget}:{RECORD if self.records else TRY}:{self.file}"

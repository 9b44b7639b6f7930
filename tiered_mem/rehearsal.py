"""How `tiered-mem plan` asks a training, through its environment, to be run for a few steps and planned."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

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

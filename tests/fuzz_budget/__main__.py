"""python -m ascend_emulator -m tests.fuzz_budget --programs 1000 --seed 1: random trainings within random budgets.

Each case is a training: a model, an optimizer, steps of many kinds, and a budget for policy="auto". It runs without
a manager and then with one. After each step torch's own peak is compared with the budget, and a step above it must
have been told of; in the end the report is compared with what torch counted. The first case with a finding of its
kind is shown with the command that runs it again. Any finding makes the exit code 1.

With --clock 910b3 of the emulator times are modelled, and a case comes to the same each time.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.fuzz_budget.run import Tally, run_case

# Each seed has its own million of cases.
CASES_OF_A_SEED = 1_000_000


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz_budget",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--programs", type=int, default=1000, metavar="N", help="how many cases (default: 1000)")
    parser.add_argument("--seconds", type=float, help="no more cases after so long")
    parser.add_argument("--seed", type=int, default=0, help="each seed has cases of its own (default: 0)")
    parser.add_argument("--case", type=int, metavar="N", help="only this case, with all that was seen of it")
    options = parser.parse_args()
    logging.getLogger("tiered_mem").addHandler(logging.NullHandler())
    gc.collect()
    gc.disable()
    gc.freeze()
    console, tally = Console(), Tally()
    if options.case is not None:
        verdict = run_case(options.case)
        tally.take(verdict)
        verdict.show(console, everything=True)
        return 1 if tally.findings else 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    first, begin = options.seed * CASES_OF_A_SEED, time.monotonic()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("programs", total=options.programs)
        for number in range(first, first + options.programs):
            verdict = run_case(number)
            if tally.take(verdict):
                verdict.show(console)
            progress.update(task, advance=1, description=f"programs, {tally.cases_with_findings} with findings")
            if options.seconds is not None and time.monotonic() - begin > options.seconds:
                break
    tally.show(console, time.monotonic() - begin)
    return 1 if tally.findings else 0


if __name__ == "__main__":
    sys.exit(main())

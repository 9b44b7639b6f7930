"""python -m tests.fuzz --seconds 600 --seed 1: random programs, whose gradients must be the same bits with tiering.

Each case is a random layered model, something to do with it, and one or two managers with random policies, budgets
and options. It runs twice without tiering and then with it, on the CPU and on the emulated NPU, there with the race
detector and in all schedules. With --device cuda, and emulator/ on PYTHONPATH, it runs on a GPU.

A case that plain torch does not run, or not the same twice, is left out and counted. A finding is shown with the
command that runs the same case again, and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import sys

from tests.fuzz.part import Part
from tests.fuzz.report import run_parts

PARTS = (("cpu", None), ("npu", "eager"), ("npu", "late"), ("npu", "random"))
ON_HARDWARE = (("cuda", None),)  # only when it is named
# Each seed has its own million of cases.
CASES_OF_A_SEED = 1_000_000


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600, help="how long in all (default: 600)")
    parser.add_argument("--seed", type=int, default=0, help="each seed has cases of its own (default: 0)")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default: 2)")
    parser.add_argument("--device", choices=("cpu", "npu", "cuda"), help="only this one")
    parser.add_argument("--schedule", choices=("eager", "late", "random"), help="only this schedule of the NPU")
    parser.add_argument("--case", type=int, metavar="N", help="only this case")
    parser.add_argument("--layers", type=int, metavar="N", help="only the first N calls of layers of each case")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--stride", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        from tests.fuzz.worker import work  # torch, which the process that waits for others does not need

        work(options)
        return
    once = options.case is not None
    arguments = ["--once"] if once else []
    if options.layers is not None:
        arguments += ["--layers", str(options.layers)]
    found = run_parts(
        [
            Part(device, schedule)
            for device, schedule in (ON_HARDWARE if options.device == "cuda" else PARTS)
            if options.device in (None, device) and options.schedule in (None, schedule or options.schedule)
        ],
        first=options.case if once else options.seed * CASES_OF_A_SEED,
        seconds=options.seconds,
        jobs=options.jobs,
        arguments=arguments,
        once=once,
    )
    sys.exit(found)


if __name__ == "__main__":
    main()

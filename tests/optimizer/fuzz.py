"""python -m tests.optimizer.fuzz: tries many optimizers in many ways, with and without tiering.

Parameters, states and whatever a step returns must be the same to the last bit, and nothing may be left of an
optimizer that is gone. A case that fails is named by the seed and the number that make it again, with --case.
On the emulated NPU, with its race detector:

    python -m ascend_emulator --races --schedule late -m tests.optimizer.fuzz --device npu --seed 1
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import time
import traceback
import warnings
from collections import Counter

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

_ENOUGH = 10  # findings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="how long to try")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="the one case to make again")
    parser.add_argument("--device", choices=("cpu", "npu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    if arguments.device != "npu":
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # or torch would load the NPU's backend
    from tests.optimizer.fuzz_case import check, draw

    gc.collect()
    gc.freeze()  # each case looks whether anything is kept alive
    warnings.simplefilter("ignore")  # torch's, of sparse tensors and of parameters that are there twice
    console, counts, overlaps = Console(), Counter[str](), Counter[str]()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    failed: list[int] = []
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("seconds", total=int(arguments.seconds))
        begin = time.monotonic()
        number = arguments.case or 0
        while True:
            case = draw(random.Random(f"{arguments.seed} {number}"), arguments.device)
            if arguments.case is not None:
                console.print(case)
            try:
                check(case, arguments.device)
            except Exception as error:
                failed.append(number)
                again = f"--device {arguments.device} --seed {arguments.seed} --case {number}"
                console.print(f"[red]{case.kind}, {case.residency}: again with {again}[/red]")
                console.print(f"{type(error).__name__}: {error}", markup=False)
                if arguments.case is not None:
                    console.print(traceback.format_exc(), markup=False)
            counts[case.kind] += 1
            overlaps[case.kind] += case.overlap is not None
            passed = time.monotonic() - begin
            progress.update(task, completed=min(int(passed), int(arguments.seconds)))
            if arguments.case is not None or passed >= arguments.seconds or len(failed) == _ENOUGH:
                break
            number += 1
    table = Table("optimizer", "cases", "with an overlap")
    for kind, count in sorted(counts.items()):
        table.add_row(kind, f"{count:,}", f"{overlaps[kind]:,}")
    console.print(table)
    console.print(f"{counts.total():,} cases, {len(failed)} findings{': ' if failed else ''}", *failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""What the emulator's race detector costs: a GPT's training step with it, beside the same step without.

The two run in turns, in processes of their own, for the detector is on or off for a whole process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import track

from benchmarks.report import report

# Reads a line, runs a step, writes the seconds it took.
STEPS = """
import contextlib, sys
from argparse import Namespace
from benchmarks.offload_overhead import Step
from tiered_mem import TieringManager

shape = Namespace(**dict(part.split("=") for part in sys.argv[1:] if "=" in part))
step = Step("npu", Namespace(**{name: int(value) for name, value in vars(shape).items()}))
with TieringManager(policy="layer-order", device="npu", host_bytes="2GiB") as manager:
    context = manager.offload_context(step.model.layers) if "tiered" in sys.argv else contextlib.nullcontext()
    step.run(context)
    for _ in sys.stdin:
        print(step.run(context), flush=True)
"""


def main() -> None:
    options = parse()
    shape = [
        f"{name}={value}" for name, value in vars(options).items() if name not in ("repeats", "json", "tiered")
    ]
    arguments = [*shape, "tiered"] if options.tiered else shape
    console = Console()
    off, on = [], []
    with steps(arguments, races=False) as without, steps(arguments, races=True) as watched:
        for _ in track(range(options.repeats), "pairs of steps", console=console):
            off.append(run(without))
            on.append(run(watched))
    result = {
        **{name: getattr(options, name) for name in ("layers", "width", "context", "batch", "tiered")},
        "step_s": statistics.median(off),
        "watched_step_s": statistics.median(on),
        "ratio": statistics.median(b / a for a, b in zip(off, on, strict=True)),
    }
    report(result, console, options.json)


@contextmanager
def steps(arguments: list[str], *, races: bool) -> Iterator[subprocess.Popen[str]]:
    """A process that runs a step for each line it is sent."""
    environment = {**os.environ, "ASCEND_EMULATOR_RACES": str(int(races))}
    code = f"import ascend_emulator; ascend_emulator.start()\n{STEPS}"
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as process:
        yield process
        pipe(process.stdin).close()


def run(process: subprocess.Popen[str]) -> float:
    pipe(process.stdin).write("\n")
    pipe(process.stdin).flush()
    line = pipe(process.stdout).readline()
    if not line:
        raise RuntimeError("the process that runs the steps has ended")
    return float(line)


def pipe(end: IO[str] | None) -> IO[str]:
    if end is None:
        raise RuntimeError("the process was started without pipes")
    return end


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--tiered", action="store_true", help="with the activations of all layers offloaded")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()

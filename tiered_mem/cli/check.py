"""Check that this machine does what the library counts on: its device, its memory, a drive.

Two minutes, on an NPU, a GPU or the cpu, each check a line. Bytes that were copied are compared, streams race, and
a small GPT is trained in each way that the library has, and without it, to the bit. Rates are told, and fail
nothing. What hangs is killed. Nothing stays in DIR.

The exit status is 1 if a check failed, and 2 if none could be run.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from datetime import date
from pathlib import Path

from ..check.about import machine
from ..check.runner import Line, Runner
from ..ground.arguments import number
from .output import console, part_bar, plain, table, write_json

_COLUMNS = {"check": False, "": False, "what was found": False}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help='such as "npu", "cuda:1" or "cpu" (the accelerator that torch has)')
    parser.add_argument(
        "--dir", type=Path, metavar="DIR", help="a directory on the drive to check (the temporary files')"
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds and steps: half a minute")
    parser.add_argument("--limit", type=float, default=60.0, metavar="SECONDS", help="for each check (60)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the results there, as JSON")


def run(options: argparse.Namespace) -> int:
    number("--limit", options.limit, at_least=1)
    folder = Path(tempfile.gettempdir()) if options.dir is None else options.dir
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is no directory; give one on the drive to check by --dir")
    if options.output is not None and not options.output.absolute().parent.is_dir():
        raise NotADirectoryError(f"{options.output} cannot be written: there is no such directory")
    lines: list[Line] = []
    runner = Runner(device=options.device, folder=str(folder), quick=options.quick, limit=options.limit)
    with closing(runner), part_bar() as bar:
        task = bar.add_task("", total=len(runner.names))
        for line in runner.lines(lambda name: bar.update(task, description=name)):
            lines.append(line)
            bar.advance(task)
    counts = Counter(line.verdict for line in lines)
    found = {
        "command": "tiered-mem check",
        **machine(),
        "device": runner.device,
        "quick": options.quick,
        "seconds": round(sum(line.seconds for line in lines), 1),
        "verdicts": dict(counts),
        "checks": [asdict(line) for line in lines],
    }
    if options.output is not None:
        write_json(found, options.output)
    if options.json:
        write_json(found)
    else:
        _show(lines, runner.device, options)
    return 1 if counts["fail"] else 0


def _show(lines: Sequence[Line], device: dict[str, object], options: argparse.Namespace) -> None:
    screen = console()
    rows = [
        (line.name, line.verdict.upper() if line.verdict == "fail" else line.verdict, line.reason) for line in lines
    ]
    screen.print(table(str(device["name"]), _COLUMNS, rows))
    counts = Counter(line.verdict for line in lines)
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    if options.output is not None:
        said += f"; attach {options.output} to an issue"
    else:
        kind = device["kind"]
        chosen = "".join(
            f" {name} {value}" for name, value in (("--device", options.device), ("--dir", options.dir)) if value
        )
        name = f"tiered-mem-check-{kind}-{date.today().isoformat()}.json"
        said += f". The file to attach to an issue is written by: tiered-mem check{chosen} -o {name}"
    screen.print(plain(said), soft_wrap=True)

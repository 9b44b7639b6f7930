"""Ways to train Llama 2 within a budget: computing again, moving, and policy="auto", which may do both.

    python -m benchmarks.recompute
    python -m benchmarks.recompute --sizes 7b-8192 --ways plain full-best auto

Dry runs on the modelled clock of a 910B3, a process for each row: the times are the same on each machine. The
optimizer's states rest on the host, but for the plain training's, which has all on the device.

    full, selective             torch's checkpoint around all layers; selective keeps products and attention
    full-best, selective-best   the same around as few layers as keep the budget
    moving                      policy="auto" with TieringManager(recompute=False)
    auto                        policy="auto"

Peaks are the highest of all steps, and times those of the last one. Exits with 1 where auto passes its budget, is
more than 1.002 times as long as another way within the budget, or is behind the goal for its size: how long forward
and backward may take over plain's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.children import found_by

from .sizes import SIZES

WAYS = ("plain", "full", "selective", "full-best", "selective-best", "moving", "auto")
RESULTS = Path(__file__).parents[1] / "results" / "recompute.json"
GIB = 1 << 30
ROUNDING = 1.002  # how much longer than another way a step may take for as long as that

Rows = Mapping[str, Mapping[str, Any]]


def main() -> int:
    options = parse()
    console = Console(width=None if sys.stdout.isatty() else 100)
    options.json.parent.mkdir(exist_ok=True)
    found: dict[str, dict[str, Any]] = {size: {} for size in options.sizes}
    pairs = [(size, way) for size in options.sizes for way in options.ways]
    with (
        Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[doing]}"),
            console=console,
        ) as progress,
        ThreadPoolExecutor(options.processes) as pool,
    ):
        rows = pool.map(lambda pair: measured(*pair, options, progress), pairs)
        for (size, way), row in zip(pairs, rows, strict=True):
            found[size][way] = row
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    for size in options.sizes:
        console.print(table(size, found[size]))
    missed = [f"{size}: {miss}" for size in options.sizes for miss in misses(size, found[size])]
    for miss in missed:
        console.print(miss, highlight=False)
    console.print(f"{len(pairs)} rows, {len(missed)} misses; written: {options.json}")
    return 1 if missed else 0


def measured(size: str, way: str, options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """What a child process finds. Raises CalledProcessError where it fails."""
    arguments = [size, way, str(options.steps), options.chip]
    return found_by("benchmarks.recompute.child", arguments, f"{size}, {way}", progress)


def misses(size: str, rows: Rows) -> Iterator[str]:
    """What auto was to be and is not, as far as the rows that were asked for tell."""
    auto, there = rows.get("auto"), SIZES[size]
    if auto is None:
        return
    if "error" in auto:
        yield f"there is no plan: {auto['error'].split('. ')[0]}"
        return
    budget = there.budget * GIB
    if auto["peak"] > budget:
        yield f"the peak of auto is {auto['peak'] / budget:.4f} of the budget"
    for way, row in rows.items():
        beside = way not in ("plain", "auto") and "error" not in row and row["peak"] <= budget
        if beside and auto["step"] > ROUNDING * row["step"]:
            yield f"auto takes {auto['step'] / row['step']:.3f} of {way}"
    if there.goal is not None and "plain" in rows and (over := over_plain(auto, rows)) > there.goal:
        yield f"forward and backward of auto take {over:.3f} of plain's; the goal is {there.goal}"


def over_plain(row: Mapping[str, Any], rows: Rows) -> float:
    """How long forward and backward take together."""
    plain = rows["plain"]
    return float((row["forward"] + row["backward"]) / (plain["forward"] + plain["backward"]))


def table(size: str, rows: Rows) -> Table:
    there = SIZES[size]
    result = Table(
        title=str(there),
        caption="modelled seconds; both: forward and backward, over plain's",
        box=SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        pad_edge=False,
    )
    result.add_column("way", no_wrap=True)
    for column in ("forward", "backward", "both", "optimizer", "step", "peak GiB"):
        result.add_column(column, justify="right", no_wrap=True)
    result.add_column("in budget")
    for way, row in rows.items():
        if "error" in row:
            result.add_row(way, "", "", "", "", "", "", f"no: {row['error'].split('. ')[0]}")
            continue
        cells = [f"{way}, {row['setting']}" if row["setting"] else way]
        cells += [f"{row[part]:.3f}" for part in ("forward", "backward")]
        cells.append(f"{over_plain(row, rows):.3f}" if "plain" in rows else "")
        cells += [f"{row[part]:.3f}" for part in ("optimizer", "step")]
        cells += [f"{row['peak'] / GIB:.2f}", "yes" if row["peak"] <= there.budget * GIB else "no"]
        result.add_row(*cells)
    return result


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--steps", type=int, default=15, help='of policy="auto", of which the last one counts')
    parser.add_argument("--chip", default="910b3", help="a name or file, as --clock of ascend_emulator takes it")
    parser.add_argument("--processes", type=int, default=2, help="how many ways are measured at a time")
    parser.add_argument("--json", type=Path, default=RESULTS, help="the file for all figures")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

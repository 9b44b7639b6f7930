"""Ways to train Llama 2 within a budget: computing again, moving, and policy="auto", which may do both.

    python -m benchmarks.recompute
    python -m benchmarks.recompute --sizes 7b-8192 --ways plain full-best auto

Dry runs on the modelled clock of a 910B3, a process for each row: the times are the same on each machine. The
optimizer's states rest on the host, and come and leave when backward is over, where nothing else is said.

    plain                       all on the device, the optimizer's states too
    plain-host                  all but these
    plain-backward              the same with overlap="backward": they come and leave beside backward
    plain-forward               and with overlap="forward": they come and leave beside the next forward
    full, selective             torch's checkpoint around all layers; selective keeps products and attention
    full-best, selective-best   the same around as few layers as keep the budget
    moving                      policy="auto" with TieringManager(recompute=False)
    auto                        policy="auto"
    auto-backward-host          the same with overlap="backward", and so auto-forward-host
    auto-backward               the same with residency="auto" for the optimizer's states, and so auto-forward

Peaks are the highest of all steps, and times those of the last one. With an overlap the optimizer's time is in what
it goes on beside: the whole step tells. Below the table are the most gradients that there are at once.

Exits with 1 where a way of policy="auto" passes its budget, or is more than 1.002 times as long as another way
within it: auto beside those without an overlap, an overlap with all states on the host beside auto as well, and one
with residency="auto" beside both. And where auto is behind the goal for its size: how long forward and backward may
take over plain's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.children import found_by
from benchmarks.overlaps import OVERLAPS

from .sizes import SIZES

UNBUDGETED = ("plain", "plain-host", *(f"plain-{overlap}" for overlap in OVERLAPS))
OVERLAPPED = tuple(f"auto-{overlap}" for overlap in OVERLAPS)
OTHERS = ("full", "selective", "full-best", "selective-best", "moving")
WAYS = (*UNBUDGETED, *OTHERS, "auto", *(f"{way}{more}" for way in OVERLAPPED for more in ("-host", "")))
RESULTS = Path(__file__).parents[1] / "results" / "recompute.json"
GIB = 1 << 30
ROUNDING = 1.002  # how much longer than another way a step may take for as long as that

Rows = Mapping[str, Mapping[str, Any]]


def main() -> int:
    options = parse()
    console = Console(width=None if sys.stdout.isatty() else 80)
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
        for line in below_table(found[size]):
            console.print(line, highlight=False)
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
    """What ways of policy="auto" were to be and are not, as far as the rows that were asked for tell."""
    yield from misses_of("auto", OTHERS, size, rows)
    for way in OVERLAPPED:
        yield from misses_of(f"{way}-host", (*OTHERS, "auto"), size, rows)
        yield from misses_of(way, (*OTHERS, "auto", f"{way}-host"), size, rows)
    goal = SIZES[size].goal
    if goal is not None and {"plain", "auto"} <= rows.keys() and "error" not in rows["auto"]:
        over = over_plain(rows["auto"], rows)
        if over > goal:
            yield f"forward and backward of auto take {over:.3f} of plain's; the goal is {goal}"


def misses_of(way: str, others: Iterable[str], size: str, rows: Rows) -> Iterator[str]:
    """others: the ways that are not to be shorter within the budget."""
    if (mine := rows.get(way)) is None:
        return
    if "error" in mine:
        yield f"there is no plan for {way}: {mine['error'].split('. ')[0]}"
        return
    budget = SIZES[size].budget * GIB
    if mine["peak"] > budget:
        yield f"the peak of {way} is {mine['peak'] / budget:.4f} of the budget"
    for other in others:
        row = rows.get(other)
        if row is None or "error" in row or row["peak"] > budget:
            continue
        if mine["step"] > ROUNDING * row["step"]:
            yield f"{way} takes {mine['step'] / row['step']:.3f} of {other}"


def over_plain(row: Mapping[str, Any], rows: Rows) -> float:
    """How long forward and backward take together."""
    plain = rows["plain"]
    return float((row["forward"] + row["backward"]) / (plain["forward"] + plain["backward"]))


def table(size: str, rows: Rows) -> Table:
    there = SIZES[size]
    result = Table(
        title=str(there),
        caption="modelled seconds; fits: into the budget\n"
        "both, whole: forward and backward, and the whole step, over plain's",
        box=SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
        show_edge=False,
    )
    result.add_column("way", no_wrap=True)
    for column in ("forward", "backward", "both", "update", "step", "whole", "peak\nGiB", "fits"):
        result.add_column(column, justify="right", no_wrap=True)
    for way, row in rows.items():
        if "error" in row:
            result.add_row(way, *[""] * 7, "no")
            continue
        cells = [f"{way}, {row['setting']}" if row["setting"] else way]
        cells += [f"{row[part]:.3f}" for part in ("forward", "backward")]
        cells.append(f"{over_plain(row, rows):.3f}" if "plain" in rows else "")
        cells += [f"{row[part]:.3f}" for part in ("optimizer", "step")]
        cells.append(f"{row['step'] / rows['plain']['step']:.3f}" if "plain" in rows else "")
        cells += [f"{row['peak'] / GIB:.2f}", "yes" if row["peak"] <= there.budget * GIB else "no"]
        result.add_row(*cells)
    return result


def below_table(rows: Rows) -> Iterator[str]:
    """What the table has no room for: the gradients, and why a way has no figures."""
    most = [f"{way} {row['gradients'] / GIB:.2f}" for way, row in rows.items() if row.get("gradients") is not None]
    if most:
        yield f"GiB of gradients at once, at most: {', '.join(most)}"
    for way, row in rows.items():
        if "error" in row:
            yield f"{way}: {row['error'].split('. ')[0]}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--steps", type=int, default=20, help='of policy="auto", of which the last one counts')
    parser.add_argument("--chip", default="910b3", help="a name or file, as --clock of ascend_emulator takes it")
    parser.add_argument("--processes", type=int, default=2, help="how many ways are measured at a time")
    parser.add_argument("--json", type=Path, default=RESULTS, help="the file for all figures")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

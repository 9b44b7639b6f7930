"""Pipelines of Llama 2 7B over several modelled NPUs, within a budget on each rank.

    python -m benchmarks.pipelines
    python -m benchmarks.pipelines --ranks 4 --schedules 1F1B ZBV

Dry runs on the modelled clock of a 910B3, one job for each schedule: the times are the same on each machine. A
step has eight microbatches; the states of the optimizer rest on the host, and its step is not in the time. The
budget of a rank is what parameters and gradients take there, and a share of what the plain run takes beside that.

    plain       all that is saved stays
    auto 50     policy="auto" with half of what is saved
    layers 8    LayerOrderPolicy(offload=8) for each forward; its peak is compared with the budgets
    bound 50    the least that there can be with that budget (`lower_bound.py`), for which scipy is needed

Exits with 1 where policy="auto" passes a budget in one of the last steps, or is longer than a LayerOrderPolicy
whose peaks are within it on all ranks, or than 1.10 of the bound.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tiered_mem.policies.planning.profile import Link

from .lower_bound import least_of_pipeline
from .rank_step import RankStep

SCHEDULES = ("GPipe", "1F1B", "interleaved", "zero-bubble", "ZBV")
RESULTS = Path(__file__).parents[1] / "results" / "pipelines.json"
HBM = "400GiB"  # so that plain has room
HOST = "2000GiB"
SETTLED = 2  # steps at the end that count
NEAR = 1.10  # of the bound

Ranks = list[dict[str, Any]]


def main() -> int:
    options = parse()
    console = Console(width=None if sys.stdout.isatty() else 80)
    found: dict[str, dict[str, Ranks]] = {}
    if options.bounds_only:
        found = json.loads(options.json.read_text())
    for schedule in track(options.schedules, "schedules", console=console):
        found[schedule] = found.get(schedule, {}) | measured(schedule, options)
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    rows = [row for schedule in found for row in judged(schedule, found[schedule])]
    console.print(table(rows))
    missed = [f"{row['schedule']}, {row['way']}: {row['miss']}" for row in rows if row["miss"]]
    for miss in missed:
        console.print(miss, highlight=False)
    console.print(f"{len(rows)} rows, {len(missed)} misses; written: {options.json}")
    return 1 if missed else 0


def measured(schedule: str, options: argparse.Namespace) -> dict[str, Ranks]:
    """What each rank says of each way, by the way, and the bounds. Raises CalledProcessError where a job fails."""
    ways = ["plain", "recorded"]
    if not options.bounds_only:
        ways += [*(f"layers {n}" for n in options.layers), *(f"auto {share}" for share in options.shares)]
    with tempfile.TemporaryDirectory() as folder:
        found = said(schedule, ways, folder, options)
        # As if no direction slowed the other, of which it is not known how much it does.
        links = [Link(each["out"], each["back"]) for each in by_rank(found.pop("recorded"))]
        steps = [RankStep.read(Path(folder, f"{rank}.json")) for rank in range(options.ranks)]
    for share in options.shares:
        found[f"bound {share}"] = bound(steps, by_rank(found["plain"]), share / 100, links)
    return found


def said(schedule: str, ways: Sequence[str], folder: str, options: argparse.Namespace) -> dict[str, Ranks]:
    ranks = str(options.ranks)
    emulator = ["-m", "ascend_emulator", "--devices", ranks, "--hbm", HBM, "--clock", options.chip, "--dry"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    child = ["-m", "benchmarks.pipelines.child", schedule, str(options.tokens), str(options.steps), folder, *ways]
    # What the modelled server has, and not this machine; and what keeps the ranks from each other's cores.
    environment = os.environ | {"TIERED_MEM_HOST_LIMIT": HOST, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *emulator, *launcher, *child]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    found: defaultdict[str, Ranks] = defaultdict(list)
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            one = json.loads(line)
            found[one["way"]].append(one)
    if done.returncode and not any("error" in each for ranks in found.values() for each in ranks):
        raise subprocess.CalledProcessError(done.returncode, child, done.stdout, done.stderr[-3000:])
    return found


def by_rank(ranks: Ranks) -> Ranks:
    return sorted(ranks, key=lambda each: int(each["rank"]))


def bound(steps: Sequence[RankStep], plain: Ranks, share: float, links: Sequence[Link]) -> Ranks:
    budgets = [int(each["standing"] + share * (max(each["peaks"]) - each["standing"])) for each in plain]
    try:
        return [{"seconds": [least_of_pipeline(steps, budgets, links)]}]
    except ValueError as error:
        return [{"error": str(error)}]


def judged(schedule: str, found: dict[str, Ranks]) -> Iterator[dict[str, Any]]:
    """A row for each way of policy="auto"."""
    plain = step(found["plain"])
    fixed = {way: ranks for way, ranks in found.items() if way.startswith("layers")}
    for way, ranks in found.items():
        if not way.startswith("auto"):
            continue
        row = {"schedule": schedule, "way": way, "plain": plain, "miss": "", "best": None, "auto": None}
        row["bound"] = least(found.get(f"bound {way.split()[1]}", []))
        if any("error" in each for each in ranks):
            yield row | {"miss": next(each["error"] for each in ranks if "error" in each).split(". ")[0]}
            continue
        budgets = {each["rank"]: each["budget"] for each in ranks}
        row |= {"auto": step(ranks), "peak": max(peak(each) / budgets[each["rank"]] for each in ranks)}
        fitting = [step(each) for each in fixed.values() if all(peak(one) <= budgets[one["rank"]] for one in each)]
        row["best"] = min(fitting, default=None)
        if row["peak"] > 1:
            row["miss"] = f"a peak is {row['peak']:.4f} of the budget"
        elif row["best"] is not None and row["auto"] > 1.002 * row["best"]:
            row["miss"] = f"it takes {row['auto'] / row['best']:.3f} of a LayerOrderPolicy"
        elif row["bound"] is not None and row["auto"] > NEAR * row["bound"]:
            row["miss"] = f"it takes {row['auto'] / row['bound']:.3f} of the bound"
        yield row


def step(ranks: Ranks) -> float:
    """The seconds of the last step, which is over when it is on the last rank."""
    return max(float(each["seconds"][-1]) for each in ranks)


def least(bound: Ranks) -> float | None:
    """The seconds of a bound; None where it is not known, or nothing keeps the budget."""
    return next((float(each["seconds"][-1]) for each in bound if "seconds" in each), None)


def peak(rank: dict[str, Any]) -> int:
    return max(rank["peaks"][-SETTLED:])


def table(rows: Sequence[dict[str, Any]]) -> Table:
    result = Table(
        title="forward and backward of eight microbatches, modelled seconds",
        caption="over: auto over plain, and over the bound; fixed: the best LayerOrderPolicy within the budgets",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    columns = "schedule", "way", "plain", "auto", "over", "bound", "of the\nbound", "fixed", "peak of\nbudget"
    for column in columns:
        result.add_column(column, justify="right" if column not in ("schedule", "way") else "left", no_wrap=True)
    for row in rows:
        cells = [row["schedule"], row["way"], f"{row['plain']:.3f}"]
        if row["auto"] is not None:
            cells += [f"{row['auto']:.3f}", f"{row['auto'] / row['plain']:.3f}"]
            bound = row["bound"]
            cells += ["", ""] if bound is None else [f"{bound:.3f}", f"{row['auto'] / bound:.3f}"]
            cells += ["" if row["best"] is None else f"{row['best']:.3f}", f"{row['peak']:.3f}"]
        result.add_row(*cells)
    return result


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES)
    parser.add_argument("--shares", nargs="+", type=int, default=[75, 50, 25], help="per cent of what is saved")
    parser.add_argument("--layers", nargs="*", type=int, default=[4, 8, 12, 16], help="of LayerOrderPolicy")
    parser.add_argument("--tokens", type=int, default=2048, help="of a microbatch, which is one sequence")
    parser.add_argument("--steps", type=int, default=24, help='of policy="auto"')
    parser.add_argument("--chip", default="910b3", help="a name or file, as --clock of ascend_emulator takes it")
    parser.add_argument("--bounds-only", action="store_true", help="all other figures are in the file already")
    parser.add_argument("--json", type=Path, default=RESULTS, help="the file for all figures")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

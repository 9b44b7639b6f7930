"""policy="auto" beside the best LayerOrderPolicy, for models, links and budgets, on the modelled clock.

    python -m benchmarks.planned
    python -m benchmarks.planned --models gpt-8 conv --links 910b-25 --budgets 50

Each training is real: the manager, torch and torch_npu on the emulated NPU, in a dry run. So all times are modelled
and the same on each machine. A budget is so many percent of the way from the least that a plan can keep to what the
plain step takes. LayerOrderPolicy is tried with each number of layers and up to three in flight, and has the best
setting for each budget. Times are steps over the plain step. bound: what no plan can better. foreseeable: what none
can that does not know what a step's loads will be, and leaves room for the fullest; with the link's latency.

Exits with 1 where auto passes a budget, is more than 1.02 times as long as the best LayerOrderPolicy, or more than
1.002 times as long as the plain step where the foreseeable bound says that all can hide.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from .links import LINKS

MODELS = ("gpt-8", "llama-7b", "moe", "vit-h", "conv", "1f1b")
RESULTS = Path(__file__).parents[1] / "results" / "planned.json"
GIB = 1 << 30


def main() -> int:
    options = parse()
    console = Console(width=None if sys.stdout.isatty() else 170)
    options.json.parent.mkdir(exist_ok=True)
    found: list[dict[str, Any]] = []
    pairs = [(model, link) for model in options.models for link in options.links]
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
        for each in pool.map(lambda pair: measured(*pair, options.budgets, progress), pairs):
            found.append(each)
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    console.print(table(found))
    missed = [f"{each['model']} behind {each['link']}: {miss}" for each in found for miss in misses(each)]
    for miss in missed:
        console.print(miss, highlight=False)
    console.print(
        f"{sum(len(each['rows']) for each in found)} cells, {len(missed)} misses; written: {options.json}"
    )
    return 1 if missed else 0


def measured(model: str, link: str, budgets: list[float], progress: Progress) -> dict[str, Any]:
    """What a child process finds. Raises CalledProcessError where it fails."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.planned.child",
        model,
        link,
        *(str(each / 100) for each in budgets),
    ]
    task = progress.add_task(f"{model} behind {link}", total=1, doing="plain")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        with ThreadPoolExecutor(1) as pool:
            errors = pool.submit(child.stderr.read)
            said: dict[str, Any] = {}
            for line in child.stdout:
                if not line.startswith("{"):  # torch_npu writes there too
                    continue
                said = json.loads(line)
                progress.update(task, doing=said.get("done", "done"))
    if child.returncode:
        progress.console.print(errors.result())
        raise subprocess.CalledProcessError(child.returncode, command)
    progress.update(task, completed=1)
    return said


def misses(found: dict[str, Any]) -> Iterator[str]:
    """What auto was to be and is not."""
    plain = found["plain"]["seconds"]
    for row in found["rows"]:
        at = f"at {row['share']:.0%}"
        auto, best = row["auto"], row["layer_order"]
        if auto is None:
            yield f"{at} there is no plan: {row['error'].split('. ')[0]}"
            continue
        if auto["peak"] > row["budget"]:
            yield f"{at} the peak is {auto['peak'] / row['budget']:.4f} of the budget"
        if best is not None and auto["seconds"] > 1.02 * best["seconds"]:
            yield f"{at} auto takes {auto['seconds'] / best['seconds']:.3f} of the best LayerOrderPolicy"
        if row["foreseeable"] <= 1.0005 * plain < auto["seconds"] / 1.0015:
            yield f"{at} auto takes {auto['seconds'] / plain:.4f} of the plain step, where all can hide"


def table(found: list[dict[str, Any]]) -> Table:
    result = Table(caption="steps over the plain step; auto first: its first step", padding=(0, 1, 0, 0))
    for column in (
        "model",
        "link",
        "plain ms",
        "budget",
        "GiB",
        "bound",
        "foreseeable",
        "auto",
        "over bound",
        "peak",
        "auto first",
    ):
        result.add_column(column, justify="left" if column in ("model", "link") else "right", no_wrap=True)
    for column in ("LayerOrder", "Megatron", "SmartSwap", "its peak"):
        result.add_column(column, justify="right", no_wrap=True)
    result.add_column("best LayerOrder", no_wrap=True)
    for each in found:
        plain = each["plain"]["seconds"]
        for row in each["rows"]:
            cells = [each["model"], each["link"], f"{1e3 * plain:.1f}", f"{row['share']:.0%}"]
            cells += [f"{row['budget'] / GIB:.2f}", f"{row['bound'] / plain:.3f}"]
            cells.append(f"{row['foreseeable'] / plain:.3f}")
            auto, best = row["auto"], row["layer_order"]
            if auto is None:
                cells += ["no plan", "", "", ""]
            else:
                cells += [f"{auto['seconds'] / plain:.3f}", f"{auto['seconds'] / row['bound'] - 1:.1%}"]
                cells += [f"{auto['peak'] / row['budget']:.1%}", f"{auto['first'] / plain:.2f}"]
            cells += [
                "none" if rule is None else f"{rule['seconds'] / plain:.3f}" for rule in (best, row["megatron"])
            ]
            swap = row["smart_swap"]
            cells += [f"{swap['seconds'] / plain:.3f}", f"{swap['peak'] / row['budget']:.0%}"]
            result.add_row(*cells, "" if best is None else best["setting"])
        result.add_section()
    return result


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--links", nargs="+", choices=LINKS, default=list(LINKS))
    parser.add_argument("--budgets", nargs="+", type=percent, default=[75.0, 50.0, 25.0, 10.0], help="in percent")
    parser.add_argument("--processes", type=int, default=2, help="how many models are trained at a time")
    parser.add_argument("--json", type=Path, default=RESULTS, help="the file for all figures")
    return parser.parse_args()


def percent(text: str) -> float:
    value = float(text)
    if not 0 < value <= 100:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and up to 100")
    return value


if __name__ == "__main__":
    sys.exit(main())

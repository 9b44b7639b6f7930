"""Draws README's pictures into docs/pictures: `python -m benchmarks.pictures`, which is `make pictures`.

memory.svg    the memory of a step of Llama 2 7B, plain and within a budget: dry runs on the modelled clock of a
              910B3, a process for each, so that it is the same on each machine
budgets.svg   the time of a step within budgets, by ways to keep to them, from benchmarks/results/planned.json
step.png      what the manager of the first picture draws of the same step
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.children import found_by

ROOT = Path(__file__).parents[2]
PLANNED = ROOT / "benchmarks" / "results" / "planned.json"
GIB = 1 << 30
TOKENS, BUDGET = 8192, 60  # GiB
STEPS = {"plain": 3, "tiered": 15}  # the last one is drawn; a plan has been chosen by then

FINE = 400  # parts of a step

# Can be told apart by eyes of any kind.
BLUE, GREY, RED, AMBER, GREEN = "#0b5fa5", "#6b7178", "#b5301c", "#a05a00", "#00705a"
STYLE: dict[Any, object] = {
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.labelcolor": "#333333",
    "svg.hashsalt": "tiered_mem",  # the same picture is the same file
}
LINKS = {"910b-25": "a link of 25 GB/s", "910b-50": "a link of 50 GB/s"}
# Of planned.json: the name here, and the colour. "bound" is what no plan is below that only moves.
WAYS = {
    "bound": ("moving alone, at best", AMBER),
    "checkpoint": ("full checkpointing", GREY),
    "selective": ("selective checkpointing", GREEN),
    "auto": ('policy="auto"', BLUE),
}
# Where the names begin: at so many GiB, and so many times the plain step.
NAMES = {
    "910b-25": {
        "bound": (16.75, 1.43),
        "checkpoint": (24.1, 1.068),
        "selective": (24.1, 1.027),
        "auto": (15.5, 0.972),
    },
    "910b-50": {
        "bound": (16.15, 1.085),
        "checkpoint": (24.1, 1.068),
        "selective": (24.1, 1.027),
        "auto": (15.5, 0.972),
    },
}


def main() -> int:
    options = parse()
    options.to.mkdir(parents=True, exist_ok=True)
    with (
        Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[doing]}"),
            console=Console(width=None if sys.stdout.isatty() else 100),
        ) as progress,
        ThreadPoolExecutor(len(STEPS)) as pool,
    ):

        def measured(way: str) -> dict[str, Any]:
            arguments = [way, *map(str, (TOKENS, BUDGET, STEPS[way])), str(options.to / "step.png")]
            return found_by("benchmarks.pictures.child", arguments, f"Llama 2 7B, {way}", progress)

        plain, tiered = pool.map(measured, STEPS)
    for name, figure in (("memory", memory(plain, tiered)), ("budgets", budgets(json.loads(PLANNED.read_text())))):
        with matplotlib.rc_context(STYLE):
            figure.savefig(options.to / f"{name}.svg", metadata={"Date": None})
    return 0


def memory(plain: Mapping[str, Any], tiered: Mapping[str, Any]) -> Figure:
    """Plain and tiered in one, and the budget."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 4.5), layout="constrained")
        axes = figure.subplots()
        for run, name, colour, fill, at in (
            (plain, "plain", GREY, 0.10, (1.28, 83)),
            (tiered, "tiered", BLUE, 0.16, (0.82, 30)),
        ):
            times, sizes = outline(run["times"], [nbytes / GIB for nbytes in run["bytes"]])
            axes.stairs(sizes, times, color=colour, linewidth=1.6, baseline=None)
            axes.stairs(sizes, times, color=colour, alpha=fill, fill=True, linewidth=0)
            told = f"{name}: {max(sizes):.1f} GiB, {run['times'][-1]:.2f} s"
            axes.text(*at, told, color=colour, weight="bold", fontsize=12)
        axes.text(
            0.82, 63, "what is above the budget\nmoves to the host and back,\nor is computed again", fontsize=10
        )
        end = max(run["times"][-1] for run in (plain, tiered))
        axes.axhline(BUDGET, color=RED, linewidth=1.4, linestyle="--")
        axes.text(end, BUDGET + 1, f"device_budget = {BUDGET} GiB", color=RED, ha="right", va="bottom")
        begins = [0.0, *tiered["parts"].values(), tiered["times"][-1]]
        for name, (begin, stop) in zip(("forward", *tiered["parts"]), pairwise(begins), strict=True):
            axes.text((begin + stop) / 2, 2, name, ha="center", va="bottom", fontsize=10, color="#333333")
        for begin in begins[1:-1]:
            axes.axvline(begin, color="#333333", linewidth=0.7, linestyle=":")
        axes.set(xlim=(0, end), ylim=(0, 100), xlabel="seconds", ylabel="allocated on the device, GiB")
        title = f"A step of Llama 2 7B with AdamW, {TOKENS:,} tokens (a modelled Ascend 910B3)"
        axes.set_title(title, loc="left", fontsize=11)
    return figure


def outline(times: Sequence[float], sizes: Sequence[float]) -> tuple[list[float], list[float]]:
    """The same with longer intervals, each with the most in it: as fine as can be seen, in a smaller file."""
    starts, most = [times[0]], [sizes[0]]
    for begin, size in zip(times[1:-1], sizes[1:], strict=True):
        if begin - starts[-1] < (times[-1] - times[0]) / FINE:
            most[-1] = max(most[-1], size)
        else:
            starts.append(begin)
            most.append(size)
    return [*starts, times[-1]], most


def budgets(planned: Sequence[Mapping[str, Any]]) -> Figure:
    """For each link the times of a step over the plain one's, against the budget."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 4.2), layout="constrained")
        panels = figure.subplots(1, len(LINKS), sharey=True)
        for axes, (link, name) in zip(panels, LINKS.items(), strict=True):
            (found,) = (each for each in planned if (each["model"], each["link"]) == ("llama-7b", link))
            _panel(axes, found, NAMES[link])
            axes.set_title(name, loc="left", fontsize=11)
        panels[0].set_ylabel("step time, times the plain step's")
        title = "8 layers of Llama 2 7B, 8,192 tokens (a modelled Ascend 910B3)"
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def _panel(axes: Axes, found: Mapping[str, Any], names: Mapping[str, tuple[float, float]]) -> None:
    plain = found["plain"]
    for way, (name, colour) in WAYS.items():
        there = [(row["budget"], _seconds(row[way], row["budget"])) for row in found["rows"]]
        xs = [budget / GIB for budget, seconds in there if seconds is not None]
        ys = [seconds / plain["seconds"] for _, seconds in there if seconds is not None]
        auto, line = way == "auto", "--" if way == "bound" else "-"
        marker = None if way == "bound" else "o"
        axes.plot(xs, ys, line, color=colour, marker=marker, markersize=5, linewidth=2.4 if auto else 1.5)
        axes.text(*names[way], name, va="center", color=colour, weight="bold" if auto else "normal", fontsize=10)
    axes.plot(plain["peak"] / GIB, 1, color="black", marker="*", markersize=11)
    axes.text(plain["peak"] / GIB, 0.975, "plain", ha="center", va="center", fontsize=10)
    axes.set(xlabel="device budget, GiB", xlim=(15, 30), ylim=(0.95, 1.6))
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)


def _seconds(way: Mapping[str, Any] | float | None, budget: float) -> float | None:
    """None where nothing of this way keeps the budget."""
    if isinstance(way, Mapping):
        return way["seconds"] if way["peak"] <= budget else None
    return way


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "pictures", help="the folder (docs/pictures)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

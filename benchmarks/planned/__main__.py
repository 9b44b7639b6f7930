"""policy="auto" beside what people do instead, for models, links and budgets, on the modelled clock.

    python -m benchmarks.planned
    python -m benchmarks.planned --models gpt-8 conv --links 910b-25 --budgets 50

Each training is real: the manager, torch and torch_npu on the emulated NPU, in a dry run. So all times are modelled
and the same on each machine. A budget is so many percent of the way from the least that a plan can keep to what the
plain step takes. Each of the others has its best setting within each budget:

    LayerOrder   LayerOrderPolicy with each number of layers and up to three in flight
    Megatron     the rule of its fine-grained offloading, with each number of layers
    SmartSwap    MindSpeed's rule, which is given the budget and does not always keep it
    checkpoint   torch's checkpoint around the first or the last layers, of each number
    selective    the same, and products, attention and convolutions are kept
    inputs       torch's checkpoint around all layers, whose inputs move by LayerOrderPolicy, of each setting

Times are steps over the plain step. least: what nothing can better that keeps, moves or computes again, by an
integer program. moving: what no plan can that moves, and computes nothing again. foreseeable: what none of these
can that does not know what a step's loads will be, and leaves room for the fullest; with the link's latency. It
needs scipy.

Exits with 1 where auto passes a budget, has no plan that others have, takes more than 1.002 times as long as the
best of the others within the budget, more than 1.10 times as long as the least, or more than 1.03 times in above a
tenth of the cells; or more than 1.002 times as long as the plain step where the foreseeable bound says that all can
hide. Layers with batch norm are not the same after a checkpoint: such times do not count.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.children import found_by

from .links import LINKS

MODELS = ("gpt-8", "llama-7b", "moe", "vit-h", "conv", "1f1b")
RESULTS = Path(__file__).parents[1] / "results" / "planned.json"
GIB = 1 << 30
OTHERS = {
    "layer_order": "LayerOrder",
    "megatron": "Megatron",
    "smart_swap": "SmartSwap",
    "checkpoint": "checkpoint",
    "selective": "selective",
    "inputs_moved": "inputs",
}
COMPUTED_AGAIN = ("checkpoint", "selective", "inputs_moved")
NEAR, FAR = 1.03, 1.10  # how near auto is to come to the least, and in all cells
SOME = 0.1  # of the cells may be less near
ROUNDING = 1.002  # how much longer than the best of the others a step may take for as long as that


def main() -> int:
    options = parse()
    console = Console(width=None if sys.stdout.isatty() else 100)
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
    for table in (bounds(found), others(found)):
        console.print(table)
    missed = [f"{each['model']} behind {each['link']}: {miss}" for each in found for miss in misses(each)]
    missed += not_near(found)
    for miss in missed:
        console.print(miss, highlight=False)
    console.print(
        f"{sum(len(each['rows']) for each in found)} cells, {len(missed)} misses; written: {options.json}"
    )
    return 1 if missed else 0


def measured(model: str, link: str, budgets: list[float], progress: Progress) -> dict[str, Any]:
    """What a child process finds. Raises CalledProcessError where it fails."""
    arguments = [model, link, *(str(each / 100) for each in budgets)]
    return found_by("benchmarks.planned.child", arguments, f"{model} behind {link}", progress, doing="plain")


def misses(found: dict[str, Any]) -> Iterator[str]:
    """What auto was to be and is not."""
    plain = found["plain"]["seconds"]
    for row in found["rows"]:
        at = f"at {row['share']:.0%}"
        auto, best = row["auto"], best_other(found, row)
        if auto is None:
            yield f"{at} there is no plan: {row['error'].split('. ')[0]}"
            continue
        if auto["peak"] > row["budget"]:
            yield f"{at} the peak is {auto['peak'] / row['budget']:.4f} of the budget"
        if best is not None and auto["seconds"] > ROUNDING * row[best]["seconds"]:
            of = f"{OTHERS[best]} {row[best]['setting']}".rstrip()
            yield f"{at} auto takes {auto['seconds'] / row[best]['seconds']:.3f} of {of}"
        if auto["seconds"] > FAR * row["least"]:
            yield f"{at} auto takes {auto['seconds'] / row['least']:.3f} of the least"
        if row["foreseeable"] <= 1.0005 * plain < auto["seconds"] / 1.0015:
            yield f"{at} auto takes {auto['seconds'] / plain:.4f} of the plain step, where all can hide"


def not_near(found: list[dict[str, Any]]) -> list[str]:
    """Whether auto is far from the least too often."""
    over = [row["auto"]["seconds"] / row["least"] for each in found for row in each["rows"] if row["auto"]]
    far = sum(each > NEAR for each in over)
    return [f"auto takes more than {NEAR} of the least in {far} of {len(over)} cells"] * (far > SOME * len(over))


def best_other(found: dict[str, Any], row: dict[str, Any]) -> str | None:
    """The fastest that keeps the budget and gives the same numbers."""
    names = [name for name in OTHERS if counts(found, name) and row[name] is not None]
    within = [name for name in names if row[name]["peak"] <= row["budget"]]
    return min(within, key=lambda name: row[name]["seconds"], default=None)


def counts(found: dict[str, Any], name: str) -> bool:
    """Whether it gives the numbers of the plain step."""
    return found["repeatable"] or name not in COMPUTED_AGAIN


def bounds(found: list[dict[str, Any]]) -> Table:
    """auto, and what nothing can better."""
    result = Table(
        caption="steps over the plain step; first: the first step of auto",
        box=SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        pad_edge=False,
    )
    for column in ("model", "link"):
        result.add_column(column, no_wrap=True)
    below = ("moving", "fore-\nseeable", "least")
    for column in ("plain ms", "budget", "GiB", *below, "auto", "over\nleast", "peak", "first"):
        result.add_column(column, justify="right", no_wrap=True)
    for each in found:
        plain = each["plain"]["seconds"]
        for row in each["rows"]:
            cells = [each["model"], each["link"], f"{1e3 * plain:.1f}", f"{row['share']:.0%}"]
            cells += [f"{row['budget'] / GIB:.2f}", f"{row['bound'] / plain:.3f}"]
            cells += [f"{row[name] / plain:.3f}" for name in ("foreseeable", "least")]
            if (auto := row["auto"]) is None:
                cells += ["no plan", "", "", ""]
            else:
                cells += [f"{auto['seconds'] / plain:.3f}", f"{auto['seconds'] / row['least'] - 1:.1%}"]
                cells += [f"{auto['peak'] / row['budget']:.1%}", f"{auto['first'] / plain:.2f}"]
            result.add_row(*cells)
        result.add_section()
    return result


def others(found: list[dict[str, Any]]) -> Table:
    """auto beside the best setting of each of the others."""
    caption = "steps over the plain step; none: no setting keeps the budget"
    if not all(each["repeatable"] for each in found):
        caption += ".\nIn brackets: not the same numbers, as batch norm counts each batch twice"
    result = Table(caption=caption, box=SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    for column in ("model", "link"):
        result.add_column(column, no_wrap=True)
    for column in ("at", "auto", "Layer\nOrder", "Mega-\ntron", "Smart\nSwap", "its\npeak", "check-\npoint"):
        result.add_column(column, justify="right", no_wrap=True)
    for column in ("selec-\ntive", "inputs", "auto /\nbest"):
        result.add_column(column, justify="right", no_wrap=True)
    result.add_column("the best", no_wrap=True)
    for each in found:
        plain = each["plain"]["seconds"]
        for row in each["rows"]:
            auto, best = row["auto"], best_other(each, row)
            cells = [each["model"], each["link"], f"{row['share']:.0%}"]
            cells.append("none" if auto is None else f"{auto['seconds'] / plain:.3f}")
            for name in OTHERS:
                if row[name] is None:
                    cells.append("none")
                else:
                    time = f"{row[name]['seconds'] / plain:.2f}"
                    cells.append(time if counts(each, name) else f"({time})")
                if name == "smart_swap":
                    cells.append(f"{row[name]['peak'] / row['budget']:.0%}")
            if best is None:
                cells += ["", "none"]
            else:
                cells.append("" if auto is None else f"{auto['seconds'] / row[best]['seconds']:.3f}")
                cells.append(OTHERS[best])
            result.add_row(*cells)
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

"""python -m tests.policies.simulated.compare: plans beside the other policies, on seven models, without a device.

For each model, link and budget: the least possible time as a multiple of the compute (`bound`), and by how many per
cent a planned step is above it, the best LayerOrderPolicy and the best LRUPolicy, each searched for over its
arguments among those that keep the budget. `ms` is what planning took.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.table import Table

from tests.policies.simulated.machine import Machine
from tests.policies.simulated.models import HARDWARE, MODELS, Hardware
from tests.policies.simulated.play import Played
from tests.policies.simulated.steps import Step, budget_between, profile
from tiered_mem.policies import LayerOrderPolicy, LRUPolicy, Policy
from tiered_mem.policies.planning import Profile, plan

SHARES = (0.75, 0.5, 0.25, 0.1)
Runs = list[tuple[int, float]]  # the peak and the seconds of each


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="models with this in their name")
    parser.add_argument("--plans-only", action="store_true", help="without the other policies")
    options = parser.parse_args()
    console = Console(width=120)
    gaps: dict[str, list[float]] = {"plan": [], "layer order": [], "lru": [], "ms": []}
    for on in HARDWARE:
        table = Table(title=on.name)
        for column in ("model", "budget", "blocks", "leave", "bound", *gaps):
            table.add_column(column, justify="left" if column == "model" else "right")
        for name, make in MODELS.items():
            if options.only in name:
                for row, found in cells(make(on), on, options.plans_only):
                    table.add_row(name, *row)
                    for key, value in found.items():
                        gaps[key].append(value)
        console.print(table)
    for name, values in gaps.items():
        if values:
            console.print(
                f"{name}: median {statistics.median(values):.2f}, 90th percentile "
                f"{sorted(values)[int(0.9 * len(values))]:.2f}, worst {max(values):.2f}, of {len(values)}",
                highlight=False,
            )


def cells(step: Step, on: Hardware, plans_only: bool) -> Iterator[tuple[list[str], dict[str, float]]]:
    """A row of the table for each budget, and its figures: per cent above the bound, and milliseconds."""
    known = profile(step)
    others = {} if plans_only else {"layer order": layer_orders(step, on), "lru": lrus(step, on)}
    for share in SHARES:
        budget = budget_between(known, share)
        fresh = Profile(*(getattr(known, field) for field in Profile.__dataclass_fields__))
        begun = time.process_time()
        made = plan(fresh, budget, on.link)
        found = {"ms": 1000 * (time.process_time() - begun)}
        outcome = Machine(Played(fresh, made), on.link).run(step)
        if outcome.peak > budget:
            raise RuntimeError(f"the plan takes {outcome.peak} bytes of {budget}")
        found["plan"] = 100 * (outcome.seconds / made.bound - 1)
        for name, runs in others.items():
            best = min((seconds for peak, seconds in runs if peak <= budget), default=None)
            if best is not None:
                found[name] = 100 * (best / made.bound - 1)
        figures = [f"{found[name]:.1f}" if name in found else "-" for name in ("plan", "layer order", "lru", "ms")]
        bound = made.bound / step.compute
        yield (
            [f"{share:.0%}", str(len(known.nbytes)), str(len(made.release)), f"{bound:.2f}", *figures],
            found,
        )


def layer_orders(step: Step, on: Hardware) -> Runs:
    layers = 1 + max(block.layer for block in step.blocks)
    return _runs(step, on, (LayerOrderPolicy(k, in_flight=f) for k in range(layers + 1) for f in range(4)))


def lrus(step: Step, on: Hardware) -> Runs:
    total = sum(block.nbytes for block in step.blocks)
    sizes = [total * i // 20 for i in range(1, 11)]
    return _runs(step, on, (LRUPolicy(size, read_ahead=size // part) for size in sizes for part in (8, 4, 2)))


def _runs(step: Step, on: Hardware, policies: Iterable[Policy]) -> Runs:
    outcomes = (Machine(policy, on.link).run(step) for policy in policies)
    return [(outcome.peak, outcome.seconds) for outcome in outcomes]


if __name__ == "__main__":
    main()

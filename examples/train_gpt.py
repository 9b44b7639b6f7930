"""Trains a GPT three times from one seed: with ample device memory, with too little, and with too little, tiered.

Too little is a share of what the ample run needed, so that the second run ends in OutOfMemoryError. The third one
has policy="auto", which is told the budget alone, and says in the end what it planned and what came of it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from devices import emulated, find_device
from training import MIB, Run, Training, add_options

from tiered_mem import TieringManager

# torch's pool takes memory in pieces of 20 MiB, and of a model this small a quarter of them lies idle.
ROOM = 1.45


def main() -> int:
    options = parse()
    console = Console()
    kind = find_device("examples/train_gpt.py")
    device = getattr(torch, kind)
    total = device.mem_get_info()[1]
    console.print(f"device: {device.get_device_name()}{emulated()}, {total / MIB:,.0f} MiB")

    training = Training(options, kind, console)

    def tiered(run: Run) -> None:
        model = training.model()
        with TieringManager(
            policy="auto", device_budget=budget, device=kind, host_bytes=options.host_bytes
        ) as manager:
            offload = manager.offload_context(model.layers)
            training.steps(run, model, training.optimizer(model), offload=offload)
            run.peak_host = int(manager.stats()["host.used.peak"])
            console.print(manager.memory_summary())

    ample = training.measure("plain, ample", training.plain)
    budget = int(ample.peak_device * options.budget)
    limit = int(budget * ROOM)
    device.set_per_process_memory_fraction(limit / total)
    without = training.measure("plain, budget", training.plain)
    within = training.measure("tiered, budget", tiered)

    console.print(table([ample, without, within], budget, limit))
    equal = ample.equals(within)
    console.print(f"tiered and ample run have bit-equal losses and final weights: {'yes' if equal else 'NO'}")
    if without.out_of_memory is None:
        console.print("the plain run fitted into the budget: there was nothing to show")
    return 0 if equal and without.out_of_memory else 1


def table(runs: list[Run], budget: int, limit: int) -> Table:
    ample = runs[0]
    share = f"{100 * budget / ample.peak_device:.0f} % of the ample run's peak"
    title = f"budget {budget / MIB:.0f} MiB, {share}; torch's pool may take {limit / MIB:.0f} MiB"
    result = Table(title=title, caption="device and host: peak MiB")
    for column in ("run", "first loss", "last loss", "device", "host", "step ms", "overhead"):
        result.add_column(column, justify="left" if column == "run" else "right", no_wrap=True)
    for run in runs:
        device = f"{run.peak_device / MIB:.0f}"
        if run.out_of_memory:
            result.add_row(run.name, "out of", "memory", device, "", "", "")
            continue
        overhead = "" if run is ample else f"{100 * (run.step / ample.step - 1):+.1f} %"
        losses = (f"{run.losses[0]:.6f}", f"{run.losses[-1]:.6f}")
        result.add_row(run.name, *losses, device, f"{run.peak_host / MIB:.0f}", f"{run.step * 1000:.0f}", overhead)
    return result


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser, width=192, context=256, batch=8, steps=20)
    parser.add_argument(
        "--budget", type=float, default=0.6, help="device memory, as a share of the ample run's peak"
    )
    parser.add_argument("--host-bytes", default="2GiB", help="host memory for activations")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""Trains a GPT three times from one seed: with ample device memory, with too little, and with too little, tiered.

Too little is a share of what the ample run needed, so that the second run ends in OutOfMemoryError. The third one
has policy="auto", which is told the budget alone, and says in the end what it planned and what came of it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import screen  # says what is missing, before torch does
import torch
from training import MIB, Run, Training, add_options

from tiered_mem import TieringManager

# torch's pool takes memory in pieces of 20 MiB, and of a model this small a quarter of them lies idle.
ROOM = 1.45


def main() -> int:
    options = parse()
    shown = screen.Screen("examples/train_gpt.py")
    console, kind = shown.console, shown.kind
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
    getattr(torch, kind).set_per_process_memory_fraction(limit / shown.total)
    without = training.measure("plain, budget", training.plain)
    within = training.measure("tiered, budget", tiered)

    share = f"{100 * budget / ample.peak_device:.0f} % of the ample run's peak"
    shown.table(
        [ample, without, within],
        f"budget {budget / MIB:.0f} MiB, {share}; torch's pool may take {limit / MIB:.0f} MiB",
    )
    shown.overhead("hooks of Python for each saved tensor, and the waits that the report above names")
    equal = ample.equals(within)
    if without.out_of_memory is None:
        console.print("the plain run fitted into the budget: there was nothing to show")
    shown.verdict("tiered and ample run have bit-equal losses and final weights", right=equal)
    return 0 if equal and without.out_of_memory else 1


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

"""Trains a GPT whose weights, gradients and optimizer states exceed the device's memory: the states rest elsewhere.

It is trained four times from one seed: with ample device memory; with a budget below the three together, which ends
in OutOfMemoryError; with the budget and the states on the host; and with them on disk, where the host has room for
few of them. The losses and weights are equal to the bit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import screen  # says what is missing, before torch does
import torch
from training import MIB, Run, Training, add_options

from tiered_mem import TieringManager
from tiered_mem.sizes import format_bytes, parse_bytes


def main() -> int:
    options = parse()
    shown = screen.Screen("examples/optimizer_tiering.py")
    console, kind = shown.console, shown.kind
    training = Training(options, kind, console)

    def tiered(run: Run, residency: str, host: int, spill_dir: str | None) -> None:
        model = training.model()
        with TieringManager(policy="lru", device=kind, host_bytes=host, spill_dir=spill_dir) as manager:
            optimizer = manager.register_optimizer(
                training.optimizer(model),
                bucket_bytes=options.bucket_bytes,
                residency=residency,
            )
            training.steps(run, model, optimizer)
            run.peak_host = int(manager.stats()["host.used.peak"])
            run.peak_disk = int(manager.stats().get("disk.used.peak", 0))

    ample = training.measure("plain, ample", training.plain)
    weights = sum(weight.nbytes for weight in ample.weights.values())
    budget = int(4 * weights * options.budget)
    console.print(
        f"weights, gradients and two states of each: 4 x {format_bytes(weights)}; budget {format_bytes(budget)}"
    )
    getattr(torch, kind).set_per_process_memory_fraction(budget / shown.total)
    without = training.measure("plain, budget", training.plain)
    on_host = training.measure("states on host", lambda run: tiered(run, "host", 3 * weights, None))
    with tempfile.TemporaryDirectory(dir=options.spill_dir) as folder:
        few = 8 * options.bucket_bytes
        on_disk = training.measure("states on disk", lambda run: tiered(run, "disk", few, folder))
        left = [path for path in Path(folder).rglob("*") if path.is_file()]

    shown.table([ample, without, on_host, on_disk])
    shown.overhead(f"in each step {format_bytes(2 * weights)} of states come to the device, and go again")
    equal = ample.equals(on_host) and ample.equals(on_disk)
    console.print(f"spill files left: {len(left)}")
    if without.out_of_memory is None:
        console.print("the plain run fitted into the budget: there was nothing to show")
    shown.verdict("all runs have bit-equal losses and final weights", right=equal)
    return 0 if equal and without.out_of_memory and not left else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser, width=384, context=64, batch=2, steps=6)
    parser.add_argument("--budget", type=float, default=0.8, help="a share of weights, gradients and states")
    parser.add_argument("--bucket-bytes", type=parse_bytes, default=8 * MIB)
    parser.add_argument("--spill-dir", help="a directory on a local drive; by default where temporary files go")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

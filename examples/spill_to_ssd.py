"""Trains a GPT whose activations exceed the device's budget and the host's together, with the rest on disk.

It is trained three times from one seed: with ample device memory, with the budgets and no disk, which ends in
OutOfMemoryError, and with a directory to spill to. The losses of the first and the last are equal to the bit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import screen  # says what is missing, before torch does
import torch
from rich.table import Table
from training import MIB, Run, Training, add_options

from tiered_mem import TieringManager
from tiered_mem.policies import LayerOrderPolicy, LRUPolicy, Policy
from tiered_mem.sizes import format_bytes, parse_bytes


def main() -> int:
    options = parse()
    shown = screen.Screen("examples/spill_to_ssd.py")
    console, kind = shown.console, shown.kind
    training = Training(options, kind, console)

    def tiered(run: Run, host: int, spill_dir: str | None) -> None:
        model = training.model()
        with TieringManager(
            policy=policy(options), device=kind, host_bytes=host, spill_dir=spill_dir, trace=True
        ) as manager:
            training.steps(
                run,
                model,
                training.optimizer(model),
                offload=manager.offload_context(model.layers),
                after_forward=lambda: console.print(where(manager)),
            )
            stats = manager.stats()
            run.peak_host, run.peak_disk = (int(stats.get(f"{tier}.used.peak", 0)) for tier in ("host", "disk"))
            console.print(manager.memory_summary())

    ample = training.measure("plain, ample", training.plain)
    activations = ample.peak_device - ample.resident
    budget = int(ample.peak_device * options.budget)
    host = int(activations * options.host)
    getattr(torch, kind).set_per_process_memory_fraction(budget / shown.total)
    without = training.measure("no disk", lambda run: tiered(run, host, None))
    with tempfile.TemporaryDirectory(dir=options.spill_dir) as folder:
        spilled = training.measure("with disk", lambda run: tiered(run, host, folder))
        left = [path for path in Path(folder).rglob("*") if path.is_file()]

    shown.table([ample, without, spilled])
    shown.overhead("the host waits for the drive, which writes and reads what neither memory has room for")
    room = budget - ample.resident
    console.print(
        f"activations {format_bytes(activations)}: the device has room for {format_bytes(room)} of them, the host "
        f"for {format_bytes(host)}, and {format_bytes(activations - room - host)} are too much for both"
    )
    equal = ample.equals(spilled)
    console.print(f"spill files left: {len(left)}")
    if without.out_of_memory is None:
        console.print("the run without a disk fitted into the budgets: there was nothing to show")
    shown.verdict("ample and spilled run have bit-equal losses and final weights", right=equal)
    return 0 if equal and without.out_of_memory and not left else 1


def policy(options: argparse.Namespace) -> Policy:
    if options.policy == "lru":
        return LRUPolicy(device_bytes=options.device_bytes)
    return LayerOrderPolicy(in_flight=1)


def where(manager: TieringManager) -> Table:
    """Where the blocks are between forward and backward."""
    stats = manager.stats()
    table = Table("place", "blocks", "MiB", title="between forward and backward of the first step")
    for place in ("device", "leaving", "host", "disk", "arriving"):
        if f"{place}.blocks.current" not in stats:
            continue
        blocks, nbytes = (int(stats[f"{place}.{what}.current"]) for what in ("blocks", "bytes"))
        table.add_row(place, str(blocks), f"{nbytes / MIB:.0f}")
    return table


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser, width=192, context=256, batch=8, steps=10)
    parser.add_argument("--policy", choices=("layer-order", "lru"), default="layer-order")
    parser.add_argument("--device-bytes", type=parse_bytes, default=64 * MIB, help="of the LRU policy")
    parser.add_argument("--budget", type=float, default=0.6, help="device memory, as a share of the ample peak")
    parser.add_argument("--host", type=float, default=0.2, help="host memory, as a share of the activations")
    parser.add_argument("--spill-dir", help="a directory on a local drive; by default where temporary files go")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

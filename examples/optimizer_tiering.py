"""Trains a GPT whose weights, gradients and optimizer states exceed the device's memory: the states rest elsewhere.

It is trained four times from one seed: with ample device memory; with a budget below the three together, which ends
in OutOfMemoryError; with the budget and the states on the host; and with them on disk, where the host has room for
few of them. The losses and weights are equal to the bit.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from devices import emulated, find_device
from gpt import GPT, batches, standard_library
from train_gpt import Run, same, track

from tiered_mem import TieringManager
from tiered_mem.sizes import format_bytes, parse_bytes

MIB = 1 << 20


@dataclass
class OptimizerRun(Run):
    """peak_disk: bytes in spill files."""

    peak_disk: int = 0


def main() -> int:
    options = parse()
    console = Console()
    kind = find_device("examples/optimizer_tiering.py")
    device = getattr(torch, kind)
    total = device.mem_get_info()[1]
    console.print(f"device: {device.get_device_name()}{emulated()}, {total / MIB:,.0f} MiB")

    ample = train("plain, ample", options, kind, console)
    weights = sum(weight.nbytes for weight in ample.weights.values())
    budget = int(4 * weights * options.budget)
    console.print(
        f"weights, gradients and two states of each: 4 x {format_bytes(weights)}; budget {format_bytes(budget)}"
    )
    device.set_per_process_memory_fraction(budget / total)
    plain = train("plain, budget", options, kind, console)
    with tempfile.TemporaryDirectory(dir=options.spill_dir) as folder:
        runs = [ample, plain]
        runs.append(train("states on the host", options, kind, console, residency="host", host=3 * weights))
        few = 8 * options.bucket_bytes
        runs.append(train("states on disk", options, kind, console, residency="disk", host=few, spill_dir=folder))
        left = [path for path in Path(folder).rglob("*") if path.is_file()]

    console.print(table(runs))
    tiered = runs[2:]
    equal = all(ample.losses == run.losses and same(ample.weights, run.weights) for run in tiered)
    console.print(f"all runs have bit-equal losses and final weights: {'yes' if equal else 'NO'}")
    console.print(f"spill files left: {len(left)}")
    if plain.out_of_memory is None:
        console.print("the plain run fitted into the budget: there was nothing to show")
    return 0 if equal and plain.out_of_memory and not left else 1


def train(
    name: str,
    options: argparse.Namespace,
    kind: str,
    console: Console,
    *,
    residency: str | None = None,
    host: int = 0,
    spill_dir: str | None = None,
) -> OptimizerRun:
    """Without a residency the optimizer is not tiered."""
    run = OptimizerRun(name)
    device = getattr(torch, kind)
    device.reset_peak_memory_stats()
    with contextlib.ExitStack() as stack:
        manager = None
        if residency is not None:
            manager = stack.enter_context(
                TieringManager(policy="lru", device=kind, host_bytes=host, spill_dir=spill_dir)
            )
        try:
            steps(run, options, kind, console, manager, residency)
        except torch.OutOfMemoryError as error:
            run.out_of_memory = str(error).split(".")[0]
            console.print(f"{name}: torch.OutOfMemoryError: {error}")
        if manager is not None:
            run.peak_host = int(manager.stats()["host.used.peak"])
            run.peak_disk = int(manager.stats().get("disk.used.peak", 0))
    run.peak_device = device.max_memory_allocated()
    gc.collect()
    device.empty_cache()
    return run


def steps(
    run: Run,
    options: argparse.Namespace,
    kind: str,
    console: Console,
    manager: TieringManager | None,
    residency: str | None,
) -> None:
    torch.manual_seed(options.seed)
    model = GPT(layers=options.layers, width=options.width, heads=options.heads, context=options.context).to(kind)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if manager is not None and residency is not None:
        optimizer = manager.register_optimizer(optimizer, bucket_bytes=options.bucket_bytes, residency=residency)
    data = batches(standard_library(), batch=options.batch, context=options.context, seed=options.seed)
    for tokens, targets in track(itertools.islice(data, options.steps), run, options.steps, console):
        began = time.perf_counter()
        loss = model(tokens.to(kind), targets.to(kind))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())
        run.seconds.append(time.perf_counter() - began)
        del loss
    run.weights = {name: weight.cpu() for name, weight in model.state_dict().items()}


def table(runs: list[OptimizerRun]) -> Table:
    result = Table(caption="device, host and disk: peak MiB")
    for column in ("run", "first loss", "last loss", "device", "host", "disk", "step ms"):
        result.add_column(column, justify="left" if column == "run" else "right", no_wrap=True)
    for run in runs:
        sizes = [f"{size / MIB:.0f}" for size in (run.peak_device, run.peak_host, run.peak_disk)]
        if run.out_of_memory:
            result.add_row(run.name, "out of", "memory", sizes[0], "", "", "")
        else:
            losses = f"{run.losses[0]:.6f}", f"{run.losses[-1]:.6f}"
            result.add_row(run.name, *losses, *sizes, f"{1e3 * run.step:.0f}")
    return result


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, default=0.8, help="a share of weights, gradients and states")
    parser.add_argument("--bucket-bytes", type=parse_bytes, default=8 * MIB)
    parser.add_argument("--spill-dir", help="a directory on a local drive; by default where temporary files go")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

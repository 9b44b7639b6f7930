"""Trains a GPT whose activations exceed the device's budget and the host's together, with the rest on disk.

It is trained three times from one seed: with ample device memory, with the budgets and no disk, which ends in
OutOfMemoryError, and with a directory to spill to. The losses of the first and the last are equal to the bit.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import sys
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from devices import emulated, find_device
from gpt import GPT, batches, standard_library
from train_gpt import Run, same, track

from tiered_mem import TieringManager
from tiered_mem.policies import LayerOrderPolicy, LRUPolicy, Policy
from tiered_mem.sizes import format_bytes, parse_bytes

MIB = 1 << 20


def main() -> int:
    options = parse()
    console = Console()
    kind = find_device("examples/spill_to_ssd.py")
    device = getattr(torch, kind)
    total = device.mem_get_info()[1]
    console.print(f"device: {device.get_device_name()}{emulated()}, {total / MIB:,.0f} MiB")

    ample, activations = train("plain, ample", options, kind, console)
    budget = int(ample.peak_device * options.budget)
    host = int(activations * options.host)
    device.set_per_process_memory_fraction(budget / total)
    without, _ = train("no disk", options, kind, console, host=host)
    with tempfile.TemporaryDirectory(dir=options.spill_dir) as folder:
        spilled, _ = train("with disk", options, kind, console, host=host, spill_dir=folder)
        left = [path for path in Path(folder).rglob("*") if path.is_file()]

    room = budget - (ample.peak_device - activations)
    console.print(
        f"activations {format_bytes(activations)}: the device has room for {format_bytes(room)} of them, the host "
        f"for {format_bytes(host)}, and {format_bytes(activations - room - host)} are too much for both"
    )
    equal = ample.losses == spilled.losses and same(ample.weights, spilled.weights)
    console.print(f"ample and spilled run have bit-equal losses and final weights: {'yes' if equal else 'NO'}")
    console.print(f"spill files left: {len(left)}")
    if without.out_of_memory is None:
        console.print("the run without a disk fitted into the budgets: there was nothing to show")
    return 0 if equal and without.out_of_memory and not left else 1


def train(
    name: str,
    options: argparse.Namespace,
    kind: str,
    console: Console,
    *,
    host: int | None = None,
    spill_dir: str | None = None,
) -> tuple[Run, int]:
    """The run, and the bytes that a step needs on the device beyond what is there before it."""
    run = Run(name)
    device = getattr(torch, kind)
    device.reset_peak_memory_stats()
    with contextlib.ExitStack() as stack:
        torch.manual_seed(options.seed)
        model = GPT(layers=options.layers, width=options.width, heads=options.heads, context=options.context)
        model = model.to(kind)
        manager = None
        if host is not None:
            manager = stack.enter_context(
                TieringManager(
                    policy=policy(options), device=kind, host_bytes=host, spill_dir=spill_dir, trace=True
                )
            )
        try:
            resident = steps(run, options, kind, console, model, manager)
        except torch.OutOfMemoryError as error:
            run.out_of_memory = str(error).split(".")[0]
            console.print(f"{name}: torch.OutOfMemoryError: {error}")
            resident = 0
    run.peak_device = device.max_memory_allocated()
    del model, manager
    gc.collect()
    device.empty_cache()
    return run, run.peak_device - resident


def steps(
    run: Run, options: argparse.Namespace, kind: str, console: Console, model: GPT, manager: TieringManager | None
) -> int:
    """Trains. The bytes that are on the device between two steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    offload = contextlib.nullcontext() if manager is None else manager.offload_context(model.layers)
    data = batches(standard_library(), batch=options.batch, context=options.context, seed=options.seed)
    for tokens, targets in track(itertools.islice(data, options.steps), run, options.steps, console):
        began = time.perf_counter()
        with offload:
            loss = model(tokens.to(kind), targets.to(kind))
        if manager is not None and not run.losses:
            console.print(where(manager))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())
        run.seconds.append(time.perf_counter() - began)
        del loss
    run.weights = {key: weight.cpu() for key, weight in model.state_dict().items()}
    if manager is not None:
        console.print(manager.memory_summary())
    return int(getattr(torch, kind).memory_allocated())


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
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy", choices=("layer-order", "lru"), default="layer-order")
    parser.add_argument("--device-bytes", type=parse_bytes, default=64 * MIB, help="of the LRU policy")
    parser.add_argument("--budget", type=float, default=0.6, help="device memory, as a share of the ample peak")
    parser.add_argument("--host", type=float, default=0.2, help="host memory, as a share of the activations")
    parser.add_argument("--spill-dir", help="a directory on a local drive; by default where temporary files go")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

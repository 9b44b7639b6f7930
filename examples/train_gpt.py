"""Trains a GPT three times from one seed: with ample device memory, with too little, and with too little, tiered.

The too-small budget is a share of what the ample run needed, so that the second run ends in OutOfMemoryError.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from devices import emulated, find_device
from gpt import GPT, batches, standard_library

from tiered_mem import TieringManager
from tiered_mem.policies import LayerOrderPolicy

MIB = 1 << 20


def main() -> int:
    options = parse()
    console = Console()
    kind = find_device("examples/train_gpt.py")
    device = getattr(torch, kind)
    total = device.mem_get_info()[1]
    console.print(f"device: {device.get_device_name()}{emulated()}, {total / MIB:,.0f} MiB")

    ample = train("plain, ample", options, kind, console)
    budget = int(ample.peak_device * options.budget)
    device.set_per_process_memory_fraction(budget / total)
    plain = train("plain, budget", options, kind, console)
    tiered = train("tiered, budget", options, kind, console, tiered=True)

    console.print(table([ample, plain, tiered], budget, options))
    equal = ample.losses == tiered.losses and same(ample.weights, tiered.weights)
    console.print(f"tiered and ample run have bit-equal losses and final weights: {'yes' if equal else 'NO'}")
    if plain.out_of_memory is None:
        console.print("the plain run fitted into the budget: there was nothing to show")
    return 0 if equal and plain.out_of_memory else 1


@dataclass
class Run:
    name: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    peak_device: int = 0
    peak_host: int = 0
    out_of_memory: str | None = None

    @property
    def step(self) -> float:
        """Seconds of a step; the first one, in which memory is first touched, does not count."""
        return statistics.median(self.seconds[1:] or self.seconds)


def train(name: str, options: argparse.Namespace, kind: str, console: Console, *, tiered: bool = False) -> Run:
    run = Run(name)
    device = getattr(torch, kind)
    device.reset_peak_memory_stats()
    with contextlib.ExitStack() as stack:
        try:
            _train(run, options, kind, console, stack, tiered)
        except torch.OutOfMemoryError as error:
            run.out_of_memory = str(error).split(".")[0]
            console.print(f"{name}: torch.OutOfMemoryError: {error}")
    run.peak_device = device.max_memory_allocated()
    gc.collect()
    device.empty_cache()
    return run


def _train(
    run: Run,
    options: argparse.Namespace,
    kind: str,
    console: Console,
    stack: contextlib.ExitStack,
    tiered: bool,
) -> None:
    torch.manual_seed(options.seed)
    model = GPT(layers=options.layers, width=options.width, heads=options.heads, context=options.context).to(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = batches(standard_library(), batch=options.batch, context=options.context, seed=options.seed)
    offload: Any = contextlib.nullcontext()
    if tiered:
        policy = LayerOrderPolicy(num_layers=options.offload)
        manager = stack.enter_context(TieringManager(policy=policy, device=kind, host_bytes=options.host_bytes))
        offload = manager.offload_context(model.layers)
    for tokens, targets in track(itertools.islice(data, options.steps), run, options.steps, console):
        began = time.perf_counter()
        with offload:
            loss = model(tokens.to(kind), targets.to(kind))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())
        run.seconds.append(time.perf_counter() - began)
        del loss
    run.weights = {name: weight.cpu() for name, weight in model.state_dict().items()}
    if tiered:
        run.peak_host = int(manager.stats()["host.used.peak"])
        console.print(manager.memory_summary())


def track(data: Any, run: Run, steps: int, console: Console) -> Any:
    """The batches, with a progress bar that shows the loss."""
    columns = (TextColumn("{task.description:<14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("loss {task.fields[loss]}"), console=console) as progress:
        task = progress.add_task(run.name, total=steps, loss="")
        for item in data:
            yield item
            progress.update(task, advance=1, loss=f"{run.losses[-1]:.4f}")


def table(runs: list[Run], budget: int, options: argparse.Namespace) -> Table:
    ample = runs[0]
    share = f"{100 * budget / ample.peak_device:.0f} % of the ample run's peak"
    title = f"budget {budget / MIB:.0f} MiB, {share}; {options.offload} of {options.layers} layers offloaded"
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


def same(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--offload", type=int, default=6, help="layers whose activations are offloaded")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--budget", type=float, default=0.6, help="device memory, as a share of the ample run's peak"
    )
    parser.add_argument("--host-bytes", default="2GiB", help="host memory for activations")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""Trains a GPT that FSDP2 shards over the ranks of a job, plainly and with tiering, and shows each rank's figures.

    python -m ascend_emulator --devices 2 --h2d 4GB/s --d2h 4GB/s \
      -m torch.distributed.run --standalone --nproc-per-node 2 examples/train_ranks.py

The tiered run has a budget for each rank: a share of what the plain run took there. Its optimizer states rest on
the host.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import devices  # says what is missing, before torch does
import torch
import torch.distributed as dist
from gpt import GPT, batches, standard_library
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tiered_mem import TieringManager

MIB = 1 << 20
BACKENDS = {"npu": "hccl", "cuda": "nccl"}


@dataclass
class Run:
    """What a rank has measured. weights: its shards, on the CPU."""

    losses: list[float]
    peak: int
    moved: int
    weights: list[torch.Tensor]

    def equals(self, other: Run) -> bool:
        return self.losses == other.losses and all(map(torch.equal, self.weights, other.weights))


def main() -> int:
    if "LOCAL_RANK" not in os.environ:
        sys.exit(f"this is for several ranks; run it as\n{__doc__.split(chr(10) * 2)[1]}")
    options = parse()
    kind = devices.find_device("examples/train_ranks.py")
    rank = int(os.environ["LOCAL_RANK"])
    devices.accelerator(kind).set_device(rank)
    dist.init_process_group(BACKENDS[kind], device_id=torch.device(kind, rank))
    console = Console(quiet=rank != 0)
    console.print(f"devices: {dist.get_world_size()} x {devices.accelerator(kind).get_device_name()}")

    plain = train(options, kind, rank, None)
    budget = int(options.budget * plain.peak)
    tiered = train(options, kind, rank, budget, console)
    rows: list[Any] = [None] * dist.get_world_size()
    mine = plain.losses[-1], plain.peak, budget, tiered.peak, tiered.moved, plain.equals(tiered)
    dist.all_gather_object(rows, mine)
    dist.destroy_process_group()
    console.print(table(rows))
    equal = all(right for *_, right in rows)
    verdict = "the tiered run has bit-equal losses and weights on all ranks"
    console.print(f"{verdict}: {'yes' if equal else 'NO'}", style="bold green" if equal else "bold red")
    return 0 if equal else 1


def train(
    options: argparse.Namespace, kind: str, rank: int, budget: int | None, console: Console | None = None
) -> Run:
    """budget: bytes of this rank's device for a tiered run; None trains plainly."""
    device = devices.accelerator(kind)
    device.empty_cache()
    device.reset_peak_memory_stats()
    torch.manual_seed(options.seed)
    model = GPT(layers=options.layers, width=options.width, heads=options.heads, context=options.context).to(kind)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    with nullcontext() if budget is None else TieringManager(device_budget=budget, host_bytes="1GiB") as manager:
        if manager is not None:
            manager.attach(model)
            optimizer = manager.register_optimizer(optimizer, residency="host")
        data = batches(standard_library(), batch=options.batch, context=options.context, seed=rank)
        for _, (tokens, targets) in zip(range(options.steps), data, strict=False):
            loss = model(tokens.to(kind), targets.to(kind))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        moved = 0
        if manager is not None:
            moved = int(manager.stats()["offloaded.bytes.total"])
            if console is not None:
                console.print(str(manager.report()), highlight=False)
    weights = [each.detach().to_local().cpu() for each in model.parameters() if isinstance(each, DTensor)]
    return Run(losses, device.max_memory_allocated(), moved, weights)


def table(rows: list[Any]) -> Table:
    result = Table(title="peaks of each rank in MiB", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("rank", "last loss", "plain", "budget", "tiered", "moved"):
        result.add_column(column, justify="right", no_wrap=True)
    for rank, (loss, *sizes, _) in enumerate(rows):
        result.add_row(str(rank), f"{loss:.6f}", *(f"{size / MIB:,.0f}" for size in sizes))
    return result


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 6), ("width", 192), ("heads", 4), ("context", 256), ("batch", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--budget", type=float, default=0.6, help="device memory, as a share of the plain run's peak"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

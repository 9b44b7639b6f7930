"""Reinforcement learning on several ranks: a GPT that FSDP2 shards is trained, and a whole copy of it generates.

    python -m ascend_emulator --devices 2 --h2d 4GB/s --d2h 4GB/s \
      -m torch.distributed.run --standalone --nproc-per-node 2 examples/rl_ranks.py

A round has three phases, as in verl and TRL. The weights are handed over: each rank gathers the learner's, one
after another, into its copy, as an engine takes them. Then that generates, and then the learner is trained on the
text and on what was written. The rounds run twice from one seed: with all there all the time, and with a manager.
Then the optimizer's states are away while weights are handed over, the learner and the states while the copy
generates, and the copy while the learner is trained. Losses, weights and written bytes are equal on all ranks.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
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
from rl_phases import generate
from torch.distributed.fsdp import fully_shard
from train_ranks import BACKENDS

from tiered_mem import TieringManager

MIB = 1 << 20


@dataclass
class Run:
    """What a rank has come to. peaks: of the device memory in each phase, the most of all rounds."""

    losses: list[float] = field(default_factory=list)
    written: list[torch.Tensor] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)
    peaks: dict[str, int] = field(default_factory=dict)

    def equals(self, other: Run) -> bool:
        tensors = zip((*self.written, *self.weights), (*other.written, *other.weights), strict=True)
        return self.losses == other.losses and all(torch.equal(*pair) for pair in tensors)


def main() -> int:
    if "LOCAL_RANK" not in os.environ:
        sys.exit(f"this is for several ranks; run it as\n{__doc__.split(chr(10) * 2)[1]}")
    options = parse()
    kind = devices.find_device("examples/rl_ranks.py")
    device = devices.accelerator(kind)
    rank = int(os.environ["LOCAL_RANK"])
    device.set_device(rank)
    dist.init_process_group(BACKENDS[kind], device_id=torch.device(kind, rank))
    console = Console(quiet=rank != 0)
    console.print(f"devices: {dist.get_world_size()} x {device.get_device_name()}{devices.emulated()}")

    plain = rounds(options, kind, None)
    with TieringManager(policy="lru", device=kind, host_bytes=options.host_bytes) as manager:
        tiered = rounds(options, kind, manager)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (plain.peaks, tiered.peaks, plain.equals(tiered)))
    dist.destroy_process_group()
    console.print(table(ranks))
    equal = all(right for *_, right in ranks)
    verdict = "losses, weights and written bytes are bit-equal with and without the manager on all ranks"
    console.print(f"{verdict}: {'yes' if equal else 'NO'}", style="bold green" if equal else "bold red")
    return 0 if equal else 1


def rounds(options: argparse.Namespace, kind: str, manager: TieringManager | None) -> Run:
    """All rounds; without a manager nothing leaves the device."""
    run, device = Run(), devices.accelerator(kind)
    gc.collect()
    device.empty_cache()
    torch.manual_seed(options.seed)
    learner = model(options, kind)
    for layer in learner.layers:
        fully_shard(layer)
    fully_shard(learner)
    optimizer: Any = torch.optim.AdamW(learner.parameters(), lr=1e-3)
    generator = model(options, kind).requires_grad_(False)
    if manager is not None:
        optimizer = manager.register_optimizer(optimizer, residency="device-until-offload")
        manager.offload(generator)

    def away(*things: Any) -> Any:
        return nullcontext() if manager is None else manager.away(*things)

    data = batches(standard_library(), batch=options.batch, context=options.context, seed=dist.get_rank())
    for _ in range(options.rounds):
        with away(optimizer):
            with phase("hand over", run, device):
                if manager is not None:
                    manager.reload(generator)
                hand_over(learner, generator)
            with away(learner), phase("generate", run, device):
                prompts = next(data)[0][:, : options.prompt].to(kind)
                run.written.append(generate(generator, prompts, options.tokens).cpu())
            if manager is not None:
                manager.offload(generator)
        with phase("train", run, device):
            written = run.written[-1][:, :-1], run.written[-1][:, 1:]
            for tokens, targets in itertools.chain(itertools.islice(data, options.steps), [written]):
                loss = learner(tokens.to(kind), targets.to(kind))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.losses.append(loss.item())
                del loss
    run.weights = [each.detach().to_local().cpu() for each in learner.parameters()]
    return run


def model(options: argparse.Namespace, kind: str) -> GPT:
    return GPT(layers=options.layers, width=options.width, heads=options.heads, context=options.context).to(kind)


@torch.no_grad()
def hand_over(learner: GPT, generator: GPT) -> None:
    """Gives the generator the learner's weights. Of these one at a time is whole on each rank."""
    for shard, weight in zip(learner.parameters(), generator.parameters(), strict=True):
        weight.copy_(shard.full_tensor())


@contextmanager
def phase(name: str, run: Run, device: Any) -> Iterator[None]:
    device.reset_peak_memory_stats()
    yield
    run.peaks[name] = max(run.peaks.get(name, 0), device.max_memory_allocated())


def table(ranks: list[Any]) -> Table:
    result = Table(title="peaks of device memory in MiB", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("rank", "phase", "all there", "with the manager"):
        result.add_column(column, justify="left" if column == "phase" else "right", no_wrap=True)
    for rank, (plain, tiered, _) in enumerate(ranks):
        for name, peak in plain.items():
            result.add_row(str(rank), name, *(f"{size / MIB:,.1f}" for size in (peak, tiered[name])))
    return result


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 6), ("width", 384), ("heads", 8), ("context", 64), ("batch", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--prompt", type=int, default=16, help="bytes that a generation begins with")
    parser.add_argument("--tokens", type=int, default=16, help="bytes that it adds")
    parser.add_argument("--steps", type=int, default=2, help="steps on the text in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--host-bytes", default="256MiB")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

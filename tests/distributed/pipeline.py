"""Trains a Llama as a pipeline of stages, plainly and with tiering: pipeline.py SCHEDULE... [--tiered WAY...]

Run by torch.distributed.run. Each rank prints a line of JSON: for each schedule and each way in which its stages
are tiered, a digest of what training gave, the peaks of device memory in the first step and in the others, and the
bytes that moved.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from emulator.tests.hccl_rank import RANK, RANKS, digest
from emulator.tests.hccl_training import sharded
from emulator.tests.llama import DEPTH, VOCABULARY, WIDTH, Block
from tests.distributed.contest import DEVICE, Found, Tiered, contest, planned
from tests.distributed.models import mesh_of
from tiered_mem import TieringManager

STEPS, MICROBATCHES, BATCH, TOKENS, LAYERS_OF_A_RANK = 3, 4, 1, 128, 4
SMALLEST = 4096
HOST_BYTES = "256MiB"

SHARDED = "1F1B, sharded"  # each stage is on two ranks, by FSDP2

SCHEDULES: dict[str, Any] = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    SHARDED: Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero bubble": ScheduleInterleavedZeroBubble,
    "ZBV": ScheduleZBVZeroBubble,
}


class Part(nn.Module):
    """The layers of one stage."""

    def __init__(self, number: int, stages: int, layers: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH) if number == 0 else nn.Identity()
        self.blocks = nn.ModuleList(Block(complex_numbers=False) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if number == stages - 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        speeds = 10000.0 ** -(torch.arange(0, DEPTH, 2, device=x.device) / DEPTH)
        angles = torch.outer(torch.arange(x.shape[1], device=x.device), speeds)
        for block in self.blocks:
            x = block(x, angles)
        output: Tensor = self.head(x)
        return output


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(name: str, make: Callable[[], TieringManager] | None = None) -> Found:
    kind = SCHEDULES[name]
    several = 2 if issubclass(kind, PipelineScheduleMulti) else 1
    shards = 2 if name == SHARDED else 1
    at, shard = divmod(RANK, shards)
    line = RANKS // shards  # of ranks, through which a microbatch goes
    stages = line * several
    own = [at + line * number for number in range(several)]
    if name == "ZBV":
        own = [at, stages - 1 - at]  # down the line, and up again
    torch.npu.synchronize()
    torch.npu.empty_cache()
    torch.npu.reset_peak_memory_stats()
    before = torch.npu.memory_allocated()
    parts = nn.ModuleList(Part(number, stages, LAYERS_OF_A_RANK // several).to(DEVICE) for number in own)
    group = None
    if shards > 1:
        mesh = mesh_of(line, shards)
        group = mesh["outer"].get_group()
        for part in parts:
            sharded(part, DEVICE, mesh=mesh["inner"])
    manager = None if make is None else make()
    torch.npu.reset_peak_memory_stats()  # to make a manager takes memory, too
    if manager is not None:
        manager.attach(parts, layers=[block for part in parts for block in part.blocks], min_bytes=SMALLEST)
    made = [
        PipelineStage(part, number, stages, torch.device(DEVICE, RANK), group=group)
        for part, number in zip(parts, own, strict=True)
    ]
    schedule = kind(made[0] if several == 1 else made, MICROBATCHES, loss_fn=loss)
    optimizer: Any = torch.optim.AdamW(parts.parameters(), lr=1e-2)
    if manager is not None:
        optimizer = manager.register_optimizer(optimizer, bucket_bytes="64KiB")
    generator = torch.Generator().manual_seed(1 + shard)
    losses, peaks = [], []
    for _ in range(STEPS):
        tokens = torch.randint(VOCABULARY, (BATCH * MICROBATCHES, TOKENS + 1), generator=generator).to(DEVICE)
        found: list[Tensor] = []
        schedule.step(
            *((tokens[:, :-1],) if 0 in own else ()),
            target=tokens[:, 1:] if stages - 1 in own else None,
            losses=found,
            return_outputs=False,
        )
        optimizer.step()
        optimizer.zero_grad()
        losses += [each.detach() for each in found]
        peaks.append(torch.npu.max_memory_allocated() - before)
        torch.npu.reset_peak_memory_stats()
    said = {"digest": digest([*losses, *parts.parameters()]), "first": peaks[0], "peak": max(peaks[1:])}
    if manager is not None:
        said |= {"moved": manager.stats()["offloaded.bytes.total"]}
        manager.close()
    return said


def layer_order() -> TieringManager:
    return TieringManager(device=DEVICE, policy="layer-order", host_bytes=HOST_BYTES)


TIERED: Tiered = {
    "layer order": lambda name, _: train(name, layer_order),
    "auto, 75 %": lambda name, peak: train(name, partial(planned, 0.75 * peak, HOST_BYTES)),
    "auto, 50 %": lambda name, peak: train(name, partial(planned, 0.5 * peak, HOST_BYTES)),
}


if __name__ == "__main__":
    contest(SCHEDULES, train, TIERED)

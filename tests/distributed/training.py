"""Trains a Llama on several ranks, plainly and with tiering: training.py SPREAD... [--tiered WAY...]

Run by torch.distributed.run. Each rank prints a line of JSON: for each way in which the model is spread, and for
each in which it is tiered, a digest of what training gave, the peak of device memory in the last step, how often
one layer's forward ran, and the bytes that moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from emulator.tests.hccl_rank import RANK, digest
from emulator.tests.llama import VOCABULARY
from tests.distributed.contest import DEVICE, Found, Tiered, contest, planned
from tests.distributed.models import LAYERS, SPREAD, llama
from tiered_mem import TieringManager
from tiered_mem.policies import LayerOrderPolicy

STEPS = 3
BATCH, TOKENS = 2, 128
HOST_BYTES = "64MiB"
SMALLEST = 4096  # of the bytes that move; the model is small


def train(spread: str, make: Callable[[], TieringManager] | None = None, **moving: Any) -> Found:
    """make: the manager, None for a plain training. moving: for its context."""
    torch.npu.synchronize()
    torch.npu.empty_cache()
    torch.npu.reset_peak_memory_stats()
    before = torch.npu.memory_allocated()
    model = llama()
    layers = nn.ModuleList(model.blocks)
    calls: list[None] = []
    layers[1].gate.register_forward_pre_hook(lambda *_: calls.append(None))
    sharded = SPREAD[spread](model)
    optimizer: Any = torch.optim.AdamW(sharded.parameters(), lr=1e-2, foreach=spread != "tp")
    manager = None if make is None else make()
    offload: Any = nullcontext()
    if manager is not None:
        offload = manager.offload_context(layers, min_bytes=SMALLEST, **moving)
        optimizer = manager.register_optimizer(optimizer, bucket_bytes="64KiB")
    generator = torch.Generator().manual_seed(1 + (RANK // 2 if spread == "tp" else RANK))
    losses, peaks = [], []
    for _ in range(STEPS):
        tokens = torch.randint(VOCABULARY, (BATCH, TOKENS + 1), generator=generator).to(DEVICE)
        with offload:
            loss = sharded(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        peaks.append(torch.npu.max_memory_allocated() - before)
        torch.npu.reset_peak_memory_stats()
    said = {"digest": digest(_all_of(losses, sharded, optimizer)), "peak": peaks[-1], "forwards": len(calls)}
    if manager is not None:
        said |= {"moved": manager.stats()["offloaded.bytes.total"]}
        manager.close()
    return said


def _all_of(losses: list[Tensor], model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Losses, weights and states."""
    states = optimizer.state_dict()["state"]
    yield from losses
    yield from model.parameters()
    yield from (states[number][key] for number in sorted(states) for key in ("step", "exp_avg", "exp_avg_sq"))


def layer_order() -> TieringManager:
    return TieringManager(device=DEVICE, policy=LayerOrderPolicy(offload=LAYERS), host_bytes=HOST_BYTES)


TIERED: Tiered = {
    "layer order": lambda spread, _: train(spread, layer_order),
    "cheap": lambda spread, _: train(spread, layer_order, recompute="cheap"),
    "full": lambda spread, _: train(spread, layer_order, recompute="full"),
    "one by moving, one by computing": lambda spread, _: train(
        spread, layer_order, recompute=(None, "full")[RANK % 2]
    ),
    "auto": lambda spread, peak: train(spread, partial(planned, 0.6 * peak, HOST_BYTES)),
    "auto, unlike": lambda spread, peak: train(spread, partial(planned, (0.5, 0.8)[RANK % 2] * peak, HOST_BYTES)),
}


if __name__ == "__main__":
    contest(SPREAD, train, TIERED)

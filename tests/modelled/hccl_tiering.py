"""A Llama sharded by FSDP2 over HCCL, with and without tiering, in a job of several ranks.

Run by torch.distributed.run. Each rank prints a line of JSON: what training gave in each way, and what had moved.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import ascend_emulator
import torch
import torch.distributed as dist
from torch import nn

from emulator.tests.hccl_training import RANK, fsdp2, whole
from emulator.tests.llama import CONTEXT, VOCABULARY, Llama
from tiered_mem import TieringManager
from tiered_mem.policies import LayerOrderPolicy

STEPS = 3


def train(tiered: bool) -> list[Any]:
    """Losses, weights and moments; then the bytes that had left the device."""
    torch.manual_seed(0)
    model = Llama().to("npu")
    blocks = list(model.blocks)
    sharded = fsdp2(model, "npu")
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    manager = TieringManager(device="npu", policy=LayerOrderPolicy(len(blocks)), host_bytes="64MiB")
    offload = manager.offload_context(nn.ModuleList(blocks)) if tiered else nullcontext()
    if tiered:
        optimizer = manager.register_optimizer(optimizer)
    generator = torch.Generator().manual_seed(1 + RANK)
    losses = []
    for _ in range(STEPS):
        tokens = torch.randint(VOCABULARY, (2, CONTEXT + 1), generator=generator).to("npu")
        with offload:
            loss = sharded(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = [whole(parameter, "npu").double().sum().item() for parameter in sharded.parameters()]
    states = optimizer.state_dict()["state"].values()
    moments = [whole(state["exp_avg_sq"], "npu").double().sum().item() for state in states]
    moved = manager.stats()
    manager.close()
    return [[losses, weights, moments], [moved["offloaded.bytes.total"], moved["reloaded.bytes.total"]]]


if __name__ == "__main__":
    torch.npu.set_device(RANK)
    dist.init_process_group("hccl")
    said: dict[str, Any] = {"rank": RANK, "plain": train(False), "tiered": train(True)}
    torch.npu.synchronize()
    said["races"] = [str(race) for race in ascend_emulator.races()]
    dist.destroy_process_group()
    print(json.dumps(said), flush=True)

"""Device meshes, DTensors, checkpoints and functional collectives over HCCL, in a job of several ranks.

Run by torch.distributed.run with a folder for checkpoints. Each rank prints a line of JSON with what was wrong.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import ascend_emulator
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
WHOLE = torch.arange(24.0).reshape(6, 4)


def redistributed() -> list[bool]:
    """All-to-all, reduce-scatter, all-reduce, and shards of different sizes."""
    rows = distribute_tensor(WHOLE.to("npu"), MESH, [Shard(0)])
    parts = DTensor.from_local(WHOLE.to("npu"), MESH, [Partial()])
    uneven = distribute_tensor(torch.arange(5.0).to("npu"), MESH, [Shard(0)])
    return [
        same(rows.full_tensor(), WHOLE),
        same(rows.redistribute(MESH, [Shard(1)]).full_tensor(), WHOLE),
        same(parts.redistribute(MESH, [Shard(0)]).full_tensor(), WHOLE * RANKS),
        same(parts.redistribute(MESH, [Replicate()]).to_local(), WHOLE * RANKS),
        same(uneven.full_tensor(), torch.arange(5.0)),
    ]


def functional_collectives() -> list[bool]:
    total = functional.all_reduce(torch.ones(4, device="npu"), "sum", MESH)
    gathered = functional.all_gather_tensor(torch.full((2,), float(RANK), device="npu"), 0, MESH)
    return [
        same(total, torch.full((4,), float(RANKS))),
        same(gathered, torch.arange(float(RANKS)).repeat_interleave(2)),
    ]


def checkpointed() -> list[bool]:
    model, optimizer = trained()
    weights, states = get_state_dict(model, optimizer)
    checkpoint.save({"weights": weights, "states": states}, checkpoint_id=sys.argv[1])
    other, other_optimizer = sharded()
    weights, states = get_state_dict(other, other_optimizer)
    checkpoint.load({"weights": weights, "states": states}, checkpoint_id=sys.argv[1])
    set_state_dict(other, other_optimizer, model_state_dict=weights, optim_state_dict=states)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return [torch.equal(one.full_tensor(), two.full_tensor()) for one, two in pairs]


def whole_state() -> list[bool]:
    model, optimizer = trained()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, _ = get_state_dict(model, optimizer, options=options)
    return [len(weights) == (4 if RANK == 0 else 0)]


def sharded() -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).to("npu")
    fully_shard(model, mesh=MESH)
    return model, torch.optim.AdamW(model.parameters())


def trained() -> tuple[Any, torch.optim.Optimizer]:
    model, optimizer = sharded()
    for _ in range(2):
        model(torch.ones(2, 8, device="npu")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def same(ours: Tensor, expected: Tensor) -> bool:
    return torch.equal(ours.cpu(), expected)


if __name__ == "__main__":
    torch.npu.set_device(RANK)
    dist.init_process_group("hccl")
    MESH = init_device_mesh("npu", (RANKS,))
    checks = (redistributed, functional_collectives, checkpointed, whole_state)
    wrong = [check.__name__ for check in checks if not all(check())]
    dist.barrier()
    raced = [str(race) for race in ascend_emulator.races()]
    dist.destroy_process_group()
    print(json.dumps({"rank": RANK, "wrong": wrong, "races": raced}), flush=True)

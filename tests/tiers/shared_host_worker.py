"""Ranks that need 4, 2, 1 and 1 parts of the host memory of their machine, which has 8: shared, and split equally.

Run by torch.distributed.run. Each rank prints a line of JSON.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from emulator.tests.hccl_rank import RANK, rank_of_job
from tiered_mem import TieringManager
from tiered_mem.policies import LayerOrderPolicy

LAYERS = (64, 32, 16, 16)[RANK]  # each of which saves 1 MiB
WAYS: dict[str, dict[str, Any]] = {"shared": {}, "equal": {"host_bytes": 0.5, "preallocate": False}}


def gradient(x: torch.Tensor, manager: TieringManager | None) -> torch.Tensor:
    """Of the input. All ranks are through with their forward before one begins with its backward."""
    x = x.clone().requires_grad_()
    layers = nn.ModuleList(nn.Tanh() for _ in range(LAYERS))
    y = x
    with contextlib.nullcontext() if manager is None else manager.offload_context(layers):
        for layer in layers:
            y = layer(y)
    dist.barrier()
    y.sum().backward()
    dist.barrier()
    assert x.grad is not None
    return x.grad


def trained(way: str) -> dict[str, Any]:
    device = f"npu:{RANK}"
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(RANK)).to(device)
    plain = gradient(x, None)
    with TieringManager(policy=LayerOrderPolicy(), device=device, **WAYS[way]) as manager:
        for _ in range(3):
            right = bool((gradient(x, manager) == plain).all())
            manager.synchronize()
        stats, summary = manager.stats(), manager.memory_summary()
        dist.barrier()
    told = {name: value for name, value in stats.items() if name.startswith(("node.", "host."))}
    return {"right": right, "kept": stats["kept.blocks.total"], "summary": summary, **told}


if __name__ == "__main__":
    with rank_of_job("gloo") as said:
        said |= {way: trained(way) for way in sys.argv[1:]}

"""Models trained by several ranks, on the emulated NPUs by HCCL and on the CPU by gloo, in one job.

Run by torch.distributed.run with the ways to train as arguments. Each rank prints a line of JSON: what each way
gave for each model on both devices, as the losses and a digest of the weights.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import ascend_emulator
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from emulator.tests.hccl_rank import RANK, RANKS, rank_of_job
from emulator.tests.llama import CONTEXT, VOCABULARY, Llama

STEPS = 4

Wrap = Callable[[nn.Module, str], nn.Module]


class Perceptrons(nn.Module):
    """Made of what computes the same bits on the NPU as on the CPU; a Llama is not."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 32)) for _ in range(3)
        )
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


MODELS: dict[str, Callable[[], nn.Module]] = {"llama": Llama, "perceptrons": Perceptrons}


def ddp(model: nn.Module, device: str) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=0.02)


def sharded(model: nn.Module, device: str, **options: Any) -> FSDPModule:
    mesh = options.pop("mesh", None) or init_device_mesh(device, (RANKS,))
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def fsdp2(model: nn.Module, device: str) -> nn.Module:
    return sharded(model, device)


def fsdp2_bf16(model: nn.Module, device: str) -> nn.Module:
    return sharded(model, device, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


def fsdp2_with_cpu_offload(model: nn.Module, device: str) -> nn.Module:
    return sharded(model, device, offload_policy=CPUOffloadPolicy() if device == "npu" else None)


def hsdp(model: nn.Module, device: str) -> nn.Module:
    mesh = init_device_mesh(device, (2, RANKS // 2), mesh_dim_names=("replicate", "shard"))
    return sharded(model, device, mesh=mesh)


def gathered(gradients: Tensor) -> list[Tensor]:
    """Those of all ranks, in the host's memory, by gloo."""
    parts = [torch.empty_like(gradients, device="cpu") for _ in range(RANKS)]
    dist.all_gather(parts, gradients.cpu())
    return parts


def without_hccl(model: nn.Module, device: str, add: Callable[[list[Tensor]], Tensor] | None = None) -> nn.Module:
    """Each gradient becomes the mean of all ranks', added up on the CPU in the ranks' order."""
    add = add or partial(reduce, torch.add)

    def take_mean(parameter: Tensor) -> None:
        parameter.grad.copy_(add(gathered(parameter.grad)) / RANKS)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(take_mean)
    return model


def without_hccl_in_pairs(model: nn.Module, device: str) -> nn.Module:
    """As HSDP adds on four ranks: first in each group of two that share a model, then over the groups."""
    return without_hccl(model, device, lambda parts: (parts[0] + parts[1]) + (parts[2] + parts[3]))


WAYS: dict[str, Wrap] = {
    "without_hccl": without_hccl,
    "without_hccl_in_pairs": without_hccl_in_pairs,
    "ddp": ddp,
    "fsdp2": fsdp2,
    "fsdp2_bf16": fsdp2_bf16,
    "fsdp2_with_cpu_offload": fsdp2_with_cpu_offload,
    "hsdp": hsdp,
}


def whole(tensor: Tensor, device: str) -> Tensor:
    tensor = tensor.detach()
    return tensor.to(device).full_tensor() if isinstance(tensor, DTensor) else tensor


def train(make: Callable[[], nn.Module], wrap: Wrap, device: str) -> list[Any]:
    """The losses of this rank, the last norm of the gradients, and a digest of the weights."""
    torch.manual_seed(0)
    model = wrap(make().to(device), device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    generator = torch.Generator().manual_seed(1 + RANK)
    losses = []
    for _ in range(STEPS):
        tokens = torch.randint(VOCABULARY, (2, CONTEXT + 1), generator=generator).to(device)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(whole(parameter, device).cpu().numpy().tobytes())
    return [[loss.item() for loss in losses], whole(norm, device).item(), digest.hexdigest()[:16]]


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    with rank_of_job("cpu:gloo,npu:hccl") as said:
        for way in sys.argv[1:]:
            for name, make in MODELS.items():
                said[f"{way} {name}"] = {device: train(make, WAYS[way], device) for device in ("npu", "cpu")}
        if os.environ["ASCEND_EMULATOR_CLOCK"]:
            torch.npu.synchronize()
            said["now"] = ascend_emulator.now()

"""A Llama that several ranks train, in the ways in which it is spread over them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from emulator.tests.hccl_rank import RANKS
from emulator.tests.hccl_training import ddp, sharded
from emulator.tests.llama import Block, Llama
from tests.distributed.contest import DEVICE

LAYERS = 6


def llama() -> Llama:
    """The same on each rank."""
    torch.manual_seed(0)
    model = Llama()
    model.blocks = nn.ModuleList(Block(complex_numbers=False) for _ in range(LAYERS))
    return model.to(DEVICE)


@cache
def mesh_of(*shape: int) -> DeviceMesh:
    """Each has communicators, of which there are not many."""
    return init_device_mesh(DEVICE, shape, mesh_dim_names=("outer", "inner")[-len(shape) :])


def fsdp2(model: Llama, **options: Any) -> nn.Module:
    return sharded(model, DEVICE, **{"mesh": mesh_of(RANKS)} | options)


def kept(model: Llama) -> nn.Module:
    return fsdp2(model, reshard_after_forward=False)


def in_pairs(model: Llama) -> nn.Module:
    return fsdp2(model, reshard_after_forward=2 if RANKS > 2 else True)


def bf16(model: Llama) -> nn.Module:
    return fsdp2(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


def checkpointed(model: Llama) -> nn.Module:
    """Every other layer, so that there is something to move besides."""
    for number in range(0, LAYERS, 2):
        model.blocks[number] = checkpoint_wrapper(model.blocks[number])
    return fsdp2(model)


def hsdp(model: Llama) -> nn.Module:
    return fsdp2(model, mesh=mesh_of(2, RANKS // 2))


def tp(model: Llama) -> nn.Module:
    """Over pairs of ranks, as the keys have two heads; with FSDP2 over the pairs where there are several."""
    pairs = RANKS // 2
    mesh = mesh_of(pairs, 2)
    plan = {name: ColwiseParallel() for name in ("query", "key", "value")} | {"output": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block.attention, mesh["inner"], plan)
        parallelize_module(
            block, mesh["inner"], {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        )
    return fsdp2(model, mesh=mesh["outer"]) if pairs > 1 else model


SPREAD: dict[str, Callable[[Llama], nn.Module]] = {
    "fsdp2": fsdp2,
    "fsdp2, kept whole": kept,
    "fsdp2, whole in pairs": in_pairs,
    "fsdp2, bf16": bf16,
    "fsdp2, checkpointed": checkpointed,
    "hsdp": hsdp,
    "ddp": partial(ddp, device=DEVICE),
    "tp": tp,
}

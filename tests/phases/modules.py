"""Modules that go away and come back, what is in them, and what they are refused with."""

from __future__ import annotations

import torch
from torch import nn

from tests.models import same
from tiered_mem import OffloadRefused, TieringManager

MIB = 1 << 20
SIDE = 512  # a square weight of that side is 1 MiB of float32


class Mixed(nn.Module):
    """Two square weights, one of them frozen, a small one, buffers of two types, and something on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIDE, SIDE)
        self.second = nn.Linear(SIDE, SIDE, bias=False).requires_grad_(False)
        self.register_buffer("scale", torch.rand(SIDE, dtype=torch.float64))
        self.register_buffer("steps", torch.tensor(3), persistent=False)
        self.register_buffer("nothing", torch.empty(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(self.first(x)) * self.scale.float()
        return y


def mixed(device: str) -> Mixed:
    torch.manual_seed(0)
    model = Mixed().to(device)
    model.register_buffer("elsewhere", torch.arange(5, device="meta" if device == "cpu" else "cpu"))
    return model


def contents(module: nn.Module) -> dict[str, torch.Tensor]:
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items() if not tensor.is_meta}


def parked(manager: TieringManager) -> int:
    return int(manager.stats()["parked.bytes.current"])


def refusals(manager: TieringManager, module: nn.Module, **options: bool) -> str:
    """What an offload is refused with. Nothing may have changed."""
    before = contents(module)
    message = ""
    try:
        manager.offload(module, **options)
    except OffloadRefused as refused:
        message = str(refused)
    assert parked(manager) == 0
    assert same(contents(module), before)
    return message

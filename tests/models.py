"""The small models that the tests train, and what is asked of them afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from tiered_mem import TieringManager


class Layer(nn.Module):
    """A residual feed-forward layer. For its backward it saves about 11 tensors of its input's size."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Layers one after the other, and the mean square of what comes out."""

    def __init__(self, layers: int, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


def stack(layers: int, device: str, dtype: torch.dtype = torch.float32) -> tuple[Stack, torch.Tensor]:
    """A model and an input for it, the same at each call."""
    torch.manual_seed(0)
    model = Stack(layers).to(dtype)
    return model.to(device), torch.randn(16, 128, 64).to(dtype).to(device)


def take_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients by parameter, on the CPU; after this the model has none."""
    gradients = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return gradients


def same(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    """Whether both hold the same names and the same bits."""
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether the condition comes true, within ten seconds: autograd's threads let go of a graph when they like."""
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()


def is_empty(manager: TieringManager) -> bool:
    """Whether all slots are back in the pool and no block is known."""
    manager.synchronize()
    stats = manager.stats()
    blocks = sum(int(count) for name, count in stats.items() if name.endswith("blocks.current"))
    return blocks == stats["host.slots"] == stats["host.used.current"] == 0

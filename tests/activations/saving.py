"""Layers of one function, and how much moves of what they save."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.models import backward, equal
from tiered_mem import TieringManager

SIZE = 64 * 96 * 4


class Apply(torch.nn.Module):
    """A layer of one function."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(*inputs)


def leaf(device: str, *shape: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(shape or (64, 96)).to(device).requires_grad_()


def moved_by(manager: TieringManager) -> int:
    return int(manager.stats()["offloaded.bytes.total"])


def assert_same(manager: TieringManager, layer: torch.nn.Module, *inputs: torch.Tensor, min_bytes: int = 1) -> int:
    """Two steps of the layer, called between two other operations, have the gradients of a plain step.

    Returns the bytes that moved in a step.
    """
    owners = (layer, *inputs)

    def forward() -> torch.Tensor:
        return layer(*(each * 2 for each in inputs)).float().pow(2).sum()

    expected = backward(forward(), *owners)
    offload = manager.offload_context([layer], min_bytes=min_bytes)
    for step in range(1, 3):
        with offload:
            loss = forward()
        moved = moved_by(manager)
        assert moved % step == 0
        assert equal(backward(loss, *owners), expected)
        del loss
    return moved // 2

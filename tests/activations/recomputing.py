"""Models whose layers are computed again, and what is asked of their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from tests.models import eventually, is_empty
from tiered_mem import TieringManager
from tiered_mem.policies import LayerOrderPolicy, Policy

LAYERS = 4
HOWS = ("full", "cheap")
STEPS = LAYERS + 2  # each layer has a trial in one of the first


@contextmanager
def tiering(device: str, policy: Policy | None = None, **arguments: Any) -> Iterator[TieringManager]:
    """A manager in which nothing may be left at the end."""
    policy = LayerOrderPolicy(0) if policy is None else policy
    with TieringManager(policy=policy, device=device, host_bytes="16MiB", **arguments) as manager:
        yield manager
        assert eventually(lambda: is_empty(manager)), manager.memory_summary()


def gradients(model: nn.Module, x: torch.Tensor, context: Callable[[], AbstractContextManager[Any]]) -> list[Any]:
    """Those of a step, of the weights and of the input, with the same random numbers each time."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    torch.manual_seed(1)
    with context():
        loss = model(x)
    loss.backward()
    return [x.grad, *(weight.grad for weight in model.parameters())]


def same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return all(one is other or torch.equal(one.cpu(), other.cpu()) for one, other in zip(some, others, strict=True))


def plain(model: nn.Module, x: torch.Tensor) -> list[Any]:
    return [None if each is None else each.clone() for each in gradients(model, x, torch.enable_grad)]


class Of(nn.Module):
    """A model of layers of the test's."""

    def __init__(self, make: Callable[[], nn.Module], layers: int = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(make() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


def saved_bytes(manager: TieringManager, model: nn.Module, x: torch.Tensor, context: Any) -> int:
    """What is alive between a forward and its backward."""
    with context:
        loss = model(x)
    alive = sum(block.nbytes for block in manager._store.blocks.by_key.values())
    loss.backward()
    return alive

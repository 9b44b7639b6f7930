"""create_graph=True: what a backward saves for another one moves as well."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import pytest
import torch
from torch import nn

from tests.models import equal
from tiered_mem import TieringManager
from tiered_mem.policies import Event, LayerOrderPolicy, Saved
from tiered_mem.policies.actions import Advice


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(torch.sin(x)))


def make(device: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(6))).to(device), torch.randn(1024, 64).to(device)


def penalty(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of a loss that holds the gradient of another one."""
    x = x.detach().requires_grad_()
    y = model(x).sum()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    (y + slope.pow(2).sum()).backward()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    model.zero_grad()
    return gradients


def test_the_gradients_are_those_of_the_plain_run(device: str) -> None:
    model, x = make(device)
    expected = penalty(model, x)
    with TieringManager(policy=LayerOrderPolicy(), device=device, host_bytes="32MiB") as manager:
        with manager.attach(model, min_bytes=4096):
            for _ in range(3):
                assert equal(penalty(model, x), expected)
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


class Counting(LayerOrderPolicy):
    """keys: the blocks that were told of."""

    def __init__(self, offload: int) -> None:
        super().__init__(offload=offload)
        self.keys: set[int] = set()

    def decide(self, event: Event) -> Sequence[Advice]:
        if isinstance(event, Saved):
            self.keys.update(key for key, _ in event.blocks)
        return super().decide(event)


def test_what_was_away_and_is_saved_once_more_is_one_block(device: str) -> None:
    model, x = make(device)
    blocks = []
    for layers in (0, 6):
        policy = Counting(layers)
        with TieringManager(policy=policy, device=device, host_bytes="32MiB") as manager:
            with manager.attach(model, min_bytes=4096):
                penalty(model, x)
            assert (manager.stats()["reloaded.blocks.total"] > 0) == (layers > 0)
        blocks.append(len(policy.keys))
    assert blocks[0] == blocks[1]


def test_the_budget_is_kept(device: str, device_module: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    model, x = make(device)
    floor = device_module.memory_allocated()
    device_module.reset_peak_memory_stats()
    expected = penalty(model, x)
    peak = device_module.max_memory_allocated()
    budget = int(floor + 0.6 * (peak - floor))
    with (
        TieringManager(device_budget=budget, device=device, host_bytes="32MiB") as manager,
        manager.attach(model, min_bytes=4096),
    ):
        for _ in range(4):
            device_module.reset_peak_memory_stats()
            assert equal(penalty(model, x), expected)
            assert device_module.max_memory_allocated() <= budget
    assert not [record for record in caplog.records if record.levelname == "WARNING"]

"""Models train with equal bits under policy="auto", in a budget that leaves room for half of what can leave."""

from __future__ import annotations

from benchmarks import torchvision_operators  # noqa: F401

# isort: split

import gc
import importlib.util
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from benchmarks.peak import Peak
from emulator.tests.library_models import LIBRARY_MODELS, LibraryModel, To
from tests.libraries.more_models import MORE_MODELS
from tests.models import Stack, equal, eventually, is_empty
from tiered_mem import TieringManager
from tiered_mem.policies.planning import BudgetTooSmall

# The first is recorded, and the others go by its plan.
STEPS = 5
LEAST = 512  # bytes of a block


def stack(dropout: float) -> nn.Module:
    return Stack(6)


def stack_loss(model: nn.Module, to: To) -> Tensor:
    loss: Tensor = model(to(torch.randn(4, 64, 64)))
    return loss


# The peak of DETR is weights and gradients, so that nothing has to leave. VGG takes minutes.
WITHOUT = ("DETR", "VGG")
ALL = {"Stack": LibraryModel("torch", stack, stack_loss)} | LIBRARY_MODELS | MORE_MODELS
SLOW = pytest.mark.slow(why="26 models of libraries that take long to import, each trained three times")


def train(kind: LibraryModel, device: str, manager: TieringManager | None = None) -> Iterator[list[Tensor]]:
    """Of each step the loss, the gradients and the weights after it, on the CPU; with dropout where there is."""
    torch.manual_seed(0)
    model = kind.make(0.1).to(device).train()
    if manager is not None:
        manager.attach(model, min_bytes=LEAST)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        gc.collect()  # of some libraries' models a step, or all of it, is a cycle
        torch.manual_seed(step)
        loss = kind.loss(model, lambda tensor: tensor.to(device))
        loss.backward()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        optimizer.step()
        yield [each.cpu() for each in (loss.detach(), *gradients, *model.state_dict().values())]
        del loss, gradients
        optimizer.zero_grad()


def least_budget(kind: LibraryModel, device: str) -> int:
    """What the error for a budget of nothing says would be enough."""
    with TieringManager(device=device, device_budget=1, host_bytes="64MiB") as manager:
        try:
            for _ in train(kind, device, manager):
                pass
        except BudgetTooSmall as error:
            return error.floor
    raise AssertionError("a budget of one byte was enough")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "Stack" else SLOW) for name in ALL if name not in WITHOUT]
)
def test_a_model_trains_with_equal_bits(name: str, device: str, device_module: object) -> None:
    kind = ALL[name]
    if kind.library == "torchvision" and importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed: make test-models")
    gc.collect()
    peak = Peak(getattr(torch, device))
    expected = list(train(kind, device))
    most = peak.read()
    budget = (least_budget(kind, device) + most) // 2
    with TieringManager(device=device, device_budget=budget, host_bytes="64MiB") as manager:
        moved = []
        for found, right in zip(train(kind, device, manager), expected, strict=True):
            assert equal(found, right)
            moved.append(int(manager.stats()["offloaded.bytes.total"]))
        assert all(before < after for before, after in pairwise(moved))
        assert manager.report().measured_peak is not None  # of steps that went by a plan
        assert eventually(lambda: is_empty(manager)), manager.memory_summary()

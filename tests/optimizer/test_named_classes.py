"""tiered_mem.optim: classes with the names of torch's, whose making gives a tiered optimizer."""

from __future__ import annotations

import inspect

import pytest
import torch

import tiered_mem
from tests.models import small_stack
from tiered_mem import TieringManager, optim
from tiered_mem.optimizer.tiered_optimizer import TieredOptimizer


def train(optimizer: torch.optim.Optimizer, model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    for _ in range(3):
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def test_making_one_gives_a_tiered_optimizer_that_is_bit_equal(device: str, manager: TieringManager) -> None:
    model, x = small_stack(2, device)
    expected = train(torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1), model, x)
    model, x = small_stack(2, device)
    kind = optim.tiered(torch.optim.AdamW, manager=lambda: manager)
    optimizer = kind(model.parameters(), lr=0.01, weight_decay=0.1, bucket_bytes="1KiB", residency="host")
    assert isinstance(optimizer, TieredOptimizer)
    assert not optimizer.at_once
    assert all(map(torch.equal, train(optimizer, model, x), expected))


@pytest.mark.parametrize("name", [name for name in dir(optim) if name != "tiered"])
def test_there_is_one_for_each_of_torchs(name: str) -> None:
    """A subclass, since trainers take all else for a factory; with its arguments and ours."""
    theirs, ours = getattr(torch.optim, name), getattr(optim, name)
    assert issubclass(ours, theirs)
    assert (ours.__name__, ours.__module__) == (name, "tiered_mem.optim")
    arguments = list(inspect.signature(ours).parameters)
    assert set(inspect.signature(theirs).parameters) < set(arguments)
    assert {"bucket_bytes", "residency", "separable"} < set(arguments)


def test_all_of_torchs_are_there() -> None:
    assert {"AdamW", "Adam", "SGD", "Adafactor", "Muon"} <= set(dir(optim))
    assert "Optimizer" not in dir(optim)
    with pytest.raises(AttributeError, match="no optimizer 'AdamX'"):
        tiered_mem.optim.AdamX  # noqa: B018


@pytest.mark.parametrize("kind", [object, "AdamW", optim.AdamW])
def test_what_is_no_class_of_optimizers_is_refused(kind: object) -> None:
    with pytest.raises(TypeError):
        optim.tiered(kind)


def test_the_error_of_the_optimizer_is_the_users_to_see(device: str, manager: TieringManager) -> None:
    model, _ = small_stack(1, device)
    with pytest.raises(ValueError, match="Invalid learning rate"):
        optim.tiered(torch.optim.AdamW, manager=lambda: manager)(model.parameters(), lr=-1.0)

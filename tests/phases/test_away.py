"""A context in which models and the states of optimizers are away."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.phases.modules import parked
from tiered_mem import Offloaded, OffloadRefused, TieringManager
from tiered_mem.phases.absence import Absence


def linear(device: str) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, 64, device=device)


def test_all_that_is_given_is_away_inside(manager: TieringManager, device: str) -> None:
    model, other = linear(device), linear(device)
    expected = model.weight.detach().clone()
    model(torch.ones(2, 64, device=device)).sum().backward()
    context = manager.away(model, other, gradients=True)
    for _ in range(2):
        with context:
            assert parked(manager) == 2 * sum(each.nbytes for each in model.parameters()) + sum(
                each.nbytes for each in other.parameters()
            )
            with pytest.raises(Offloaded):
                model.weight + 1
        assert parked(manager) == 0
        assert torch.equal(model.weight, expected)


def test_it_comes_back_when_the_body_fails(manager: TieringManager, device: str) -> None:
    model = linear(device)
    with pytest.raises(ZeroDivisionError), manager.away(model):
        raise ZeroDivisionError
    assert parked(manager) == 0


def test_where_one_cannot_leave_the_others_come_back(manager: TieringManager, device: str) -> None:
    first, second = linear(device), linear(device)
    view = second.weight.detach()[:1]
    with pytest.raises(OffloadRefused, match="weight cannot be offloaded"), manager.away(first, second):
        pytest.fail("it is entered")
    assert parked(manager) == 0
    assert torch.equal(second.weight[:1], view)


def test_with_no_room_on_the_device_all_stay_away(manager: TieringManager, device: str) -> None:
    models = [linear(device) for _ in range(2)]
    expected = models[0].weight.detach().clone()
    nbytes = sum(each.nbytes for each in models[0].parameters())

    def reload_the_first(model: nn.Module) -> None:
        if model is models[1]:
            raise torch.OutOfMemoryError("full")
        manager.reload(model)

    absence = Absence(manager.offload, reload_the_first, models)
    with pytest.raises(torch.OutOfMemoryError, match="all of it stays away"), absence:
        assert parked(manager) == 2 * nbytes
    assert parked(manager) == 2 * nbytes
    for model in models:
        manager.reload(model)
    assert torch.equal(models[0].weight, expected)

"""What is in a module that goes away: tied weights, views, gradients, inference tensors."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from tests.models import backward, equal, same
from tests.phases.modules import MIB, SIDE, contents, parked, refusals
from tiered_mem import Offloaded, TieringManager


def test_tied_weights_stay_tied(manager: TieringManager, device: str) -> None:
    model = nn.Module()
    model.embedding = nn.Embedding(SIDE, SIDE)
    model.head = nn.Linear(SIDE, SIDE, bias=False)
    model.head.weight = model.embedding.weight
    model.register_buffer("seen", model.head.weight.detach())  # another tensor, the same memory
    model.to(device)
    model.seen = model.head.weight.detach()
    before = contents(model)
    manager.offload(model)
    assert parked(manager) == MIB
    manager.reload(model)
    assert same(contents(model), before)
    assert model.head.weight is model.embedding.weight
    assert model.seen.data_ptr() == model.head.weight.data_ptr()


def test_views_of_one_flat_buffer_stay_views_of_one(manager: TieringManager, device: str) -> None:
    flat = torch.randn(3 * SIDE * SIDE, device=device)
    model = nn.Module()
    model.first = nn.Parameter(flat[: SIDE * SIDE].view(SIDE, SIDE).t())
    model.second = nn.Parameter(flat[2 * SIDE * SIDE :].view(SIDE, SIDE))
    model.register_buffer("bytes", flat.detach().view(torch.uint8)[8:20:2])
    model.register_buffer("broadcast", flat.detach()[:SIDE].expand(3, SIDE))
    assert "of the module use its memory" in refusals(manager, model)  # as long as `flat` lives
    before = contents(model)
    lying = [(t.size(), t.stride(), t.storage_offset()) for t in (*model.parameters(), *model.buffers())]
    del flat
    manager.offload(model)
    assert parked(manager) == 3 * MIB
    manager.reload(model)
    assert same(contents(model), before)
    tensors = [*model.parameters(), *model.buffers()]
    assert [(t.size(), t.stride(), t.storage_offset()) for t in tensors] == lying
    assert len({tensor.untyped_storage()._cdata for tensor in tensors}) == 1


def test_a_buffer_that_is_a_view_leaves_with_what_it_is_a_view_of(
    manager: TieringManager, device: str, device_module: Any
) -> None:
    model = nn.Module()
    model.register_buffer("table", torch.randn(SIDE, SIDE, device=device).cos()[None, :8])
    before = contents(model)
    manager.offload(model)
    assert parked(manager) == MIB
    manager.reload(model)
    assert same(contents(model), before)
    model.table.zero_()
    assert model.table._base.count_nonzero().item() == SIDE * (SIDE - 8)


def test_gradients_stay_unless_they_are_asked_for(manager: TieringManager, device: str) -> None:
    layer = nn.Linear(SIDE, SIDE).to(device)
    layer(torch.ones(2, SIDE, device=device)).sum().backward()
    assert layer.weight.grad is not None
    gradient = layer.weight.grad
    expected = gradient.cpu()
    manager.offload(layer)
    assert parked(manager) == MIB + 4 * SIDE
    assert torch.equal(gradient.cpu(), expected)
    manager.offload(layer, gradients=True)
    assert parked(manager) == 2 * (MIB + 4 * SIDE)
    with pytest.raises(Offloaded, match=r"weight\.grad of Linear is offloaded"):
        gradient.cpu()
    del gradient  # the parameter alone has it now
    manager.reload(layer)
    assert torch.equal(layer.weight.grad.cpu(), expected)
    assert parked(manager) == 0


def test_gradients_that_were_dropped_while_away(manager: TieringManager, device: str, no_gc: None) -> None:
    layer = nn.Linear(SIDE, SIDE).to(device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(torch.ones(2, SIDE, device=device)).sum().backward()
    kept = layer.weight.grad
    assert kept is not None
    expected = kept.cpu()
    manager.offload(layer, gradients=True)
    optimizer.zero_grad()
    assert parked(manager) == 2 * MIB + 4 * SIDE  # the bias's gradient is gone
    manager.reload(layer)
    assert layer.weight.grad is None
    assert torch.equal(kept.cpu(), expected)


def test_inference_tensors_come_back_as_such(manager: TieringManager, device: str) -> None:
    with torch.inference_mode():
        layer = nn.Linear(SIDE, SIDE, device=device)
        x = torch.ones(2, SIDE, device=device)
        expected = layer(x).cpu()
        manager.offload(layer)
    manager.reload(layer)
    assert layer.weight.is_inference()
    with torch.inference_mode():
        assert torch.equal(layer(x).cpu(), expected)


def test_in_inference_mode_other_tensors_are_no_inference_tensors_afterwards(
    manager: TieringManager, device: str
) -> None:
    layer, x = nn.Linear(SIDE, SIDE).to(device), torch.ones(2, SIDE, device=device)
    expected = backward(layer(x).sum(), layer)
    with torch.inference_mode():
        manager.offload(layer)
        manager.reload(layer)
    assert not layer.weight.is_inference()
    assert equal(backward(layer(x).sum(), layer), expected)
    manager.offload(layer)
    with torch.inference_mode():
        manager.reload(layer)
        layer(x)
    assert equal(backward(layer(x).sum(), layer), expected)


def test_copies_of_a_module_that_was_away_know_nothing_of_it(manager: TieringManager, device: str) -> None:
    layer = nn.Linear(4, 4).to(device)
    manager.offload(layer)
    manager.reload(layer)
    before = contents(layer)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer.cpu()))):
        assert same(contents(other), before)
    del layer, other
    manager.synchronize()
    assert manager.stats()["host.slots"] == 0

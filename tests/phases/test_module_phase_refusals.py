"""Modules and tensors that cannot go away: what is refused, and that nothing has changed then."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.conftest import MakeManager
from tests.models import backward, equal, same
from tests.phases.modules import contents, parked, refusals
from tiered_mem import Closed, Offloaded, OffloadRefused, TieredMemError, TieringManager


def test_only_modules_have_phases(manager: TieringManager) -> None:
    for call in (manager.offload, manager.reload):
        with pytest.raises(TypeError, match=r"or what register_optimizer returned, not list"):
            call([nn.Linear(2, 2)])  # type: ignore[arg-type]


def test_a_closed_manager_refuses(make_manager: MakeManager, device: str) -> None:
    manager = make_manager(1)
    manager.close()
    with pytest.raises(Closed):
        manager.offload(nn.Linear(2, 2).to(device))


@pytest.mark.parametrize("operation", [functional.linear, torch.matmul, torch.mul], ids=lambda o: o.__name__)
def test_an_offload_between_forward_and_backward_is_refused(
    manager: TieringManager, device: str, operation: Callable[..., torch.Tensor]
) -> None:
    model = nn.ParameterList([nn.Parameter(torch.randn(8, 8, device=device))])
    x = torch.randn(8, 8, device=device, requires_grad=True)
    expected = backward(operation(x, model[0]).sum(), model, x)
    loss = operation(x, model[0]).sum()
    assert "whose backward has not run" in refusals(manager, model)
    assert equal(backward(loss, model, x), expected)
    manager.offload(model)  # `loss` is alive, and needs the weight no more
    manager.reload(model)


def test_a_buffer_that_a_graph_saved_is_refused(manager: TieringManager, device: str) -> None:
    model = nn.Module()
    model.register_buffer("scale", torch.randn(8, device=device))
    loss = (torch.ones(8, device=device, requires_grad=True) * model.scale).sum()
    assert "scale cannot be offloaded" in refusals(manager, model)
    loss.backward()
    manager.offload(model)
    manager.reload(model)


def test_a_backward_that_only_adds_to_a_gradient_is_refused(manager: TieringManager, device: str) -> None:
    model = nn.ParameterList([nn.Parameter(torch.randn(8, 8, device=device))])
    loss = (torch.ones(8, 8, device=device) + model[0]).sum()  # saves nothing
    manager.offload(model)
    with pytest.raises(Offloaded, match="0 of ParameterList is offloaded, and a backward computes its gradient"):
        loss.backward(retain_graph=True)
    manager.reload(model)
    loss.backward()
    assert model[0].grad is not None
    assert torch.equal(model[0].grad.cpu(), torch.ones(8, 8))


def test_a_weight_that_a_hook_kept_is_not_taken_for_an_empty_one(manager: TieringManager, device: str) -> None:
    """Nothing counts it, nothing of ours is asked for it, and (8, 1) would broadcast with (0,)."""
    scale = nn.ParameterList([nn.Parameter(torch.randn(8, 1, device=device), requires_grad=False)])
    x = torch.ones(8, 1, device=device, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        loss = (x * scale[0]).sum()
    manager.offload(scale)
    with pytest.raises(RuntimeError, match="must match the size"):
        loss.backward(retain_graph=True)
    manager.reload(scale)
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, scale[0])


def test_memory_that_others_use_is_refused(manager: TieringManager, device: str) -> None:
    layer = nn.Linear(8, 8).to(device)
    view = layer.weight.detach()[2:]  # and what it is a view of
    assert "weight cannot be offloaded: 2 tensors that are not of the module" in refusals(manager, layer)
    del view
    layer(torch.ones(8, device=device)).sum().backward()
    assert layer.bias.grad is not None
    views = [layer.bias.grad.view(-1)]
    assert "bias.grad cannot be offloaded" in refusals(manager, layer, gradients=True)
    views.clear()
    manager.offload(layer)
    manager.reload(layer)


def test_a_part_whose_memory_the_whole_uses_is_refused(manager: TieringManager, device: str) -> None:
    flat = torch.randn(16, device=device)
    model = nn.Sequential(nn.Linear(2, 4, bias=False), nn.Linear(2, 4, bias=False))
    for number, layer in enumerate(model):
        layer.weight = nn.Parameter(flat[8 * number :][:8].view(4, 2))
    del flat
    refusals(manager, model[0])
    before = contents(model)
    manager.offload(model)
    manager.reload(model[1])  # and what shares its memory
    assert same(contents(model), before)


class Subclass(torch.Tensor):
    """Some tensor of somebody's own."""


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (lambda t: t.as_subclass(Subclass), "it is a Subclass, and only plain tensors"),
        (lambda t: t.to(torch.complex64).conj(), "conjugate"),
        (lambda t: t.clone().requires_grad_() * 2, "autograd computed it"),
    ],
    ids=["subclass", "conjugate", "computed"],
)
def test_tensors_that_cannot_leave_are_refused(
    manager: TieringManager, device: str, tensor: Callable[[torch.Tensor], torch.Tensor], reason: str
) -> None:
    model = nn.Linear(4, 4).to(device)
    model.register_buffer("strange", tensor(torch.ones(4, device=device)))
    with pytest.raises(OffloadRefused, match=f"strange cannot be offloaded: .*{reason}"):
        manager.offload(model)
    assert parked(manager) == 0
    assert type(model.weight) is nn.Parameter


def test_a_parameter_without_a_shape_is_refused(manager: TieringManager, device: str) -> None:
    with pytest.raises(OffloadRefused, match="UninitializedParameter"):
        manager.offload(nn.LazyLinear(4).to(device))


def test_private_formats_are_refused(
    make_manager: MakeManager, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device != "npu":
        pytest.skip("only an NPU has them")
    monkeypatch.setattr("torch.ops.npu.get_npu_format.default._op", lambda tensor: 29)
    assert "private format" in refusals(make_manager(1), nn.Linear(4, 4).to(device))


def test_the_errors_are_of_the_family() -> None:
    for error in (Offloaded, OffloadRefused):
        assert issubclass(error, TieredMemError)
        assert issubclass(error, RuntimeError)

"""Layers inside layers, layers that fail inside them, and contexts inside contexts."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import MakeManager
from tests.models import Layer, assert_same, backward, equal, is_empty, small_stack
from tiered_mem import TieringManager

pytestmark = pytest.mark.usefixtures("no_gc")


class Outer(nn.Module):
    """A layer with another one inside, before and after which it saves tensors of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.inner((x * self.scale).tanh()) * self.scale).sigmoid()


@pytest.mark.parametrize("num_layers", [1, 3, None])
def test_layers_inside_layers(device: str, make_manager: MakeManager, num_layers: int | None) -> None:
    torch.manual_seed(0)
    innermost = Layer(16)
    middle = Outer(innermost)
    outer = Outer(nn.Sequential(middle, nn.GELU(), innermost)).to(device)
    x = torch.randn(32, 16).to(device).requires_grad_()
    manager = make_manager(num_layers)
    offload = manager.offload_context([outer, middle, innermost], min_bytes=1)
    assert_same(lambda: outer(outer(x)).sum(), offload, outer, x)
    assert int(manager.stats()["offloaded.blocks.total"]) > 0


def test_what_an_outer_layer_saves_after_an_inner_one_moves_too(device: str, make_manager: MakeManager) -> None:
    x = torch.randn(32, 16).to(device).requires_grad_()
    inner = nn.Identity()
    outer = Outer(inner).to(device)
    manager = make_manager()
    with manager.offload_context([outer, inner], min_bytes=x.nbytes):
        loss = outer(x).sum()
    # x * scale saves x; tanh and sigmoid save their outputs; tanh's is saved by the second product again.
    assert manager.stats()["offloaded.bytes.total"] == 3 * x.nbytes
    loss.backward()


def test_a_layer_that_never_began_ends_no_other(device: str, make_manager: MakeManager) -> None:
    x = torch.randn(32, 16).to(device).requires_grad_()
    inner = nn.Identity()

    def refuse(module: nn.Module, inputs: object) -> None:
        raise ValueError

    class Catching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with contextlib.suppress(ValueError):
                inner(x)
            return (x * 2).tanh()

    inner.register_forward_pre_hook(refuse)
    outer = Catching()
    manager = make_manager()
    with manager.offload_context([outer, inner], min_bytes=x.nbytes):
        loss = outer(x).sum()
    assert manager.stats()["offloaded.bytes.total"] == x.nbytes
    loss.backward()


def test_a_layer_whose_failure_the_model_catches(device: str, make_manager: MakeManager) -> None:
    """The layer before goes on, and what comes after is the layers' own again."""

    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.tanh().exp()
            raise ValueError

    class Fallback(nn.Module):
        def __init__(self, first: nn.Module, second: nn.Module) -> None:
            super().__init__()
            self.first, self.second = first, second

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.tanh()
            try:
                return self.first(x)
            except ValueError:
                return self.second(x.exp())

    model, x = small_stack(3, device)
    failing = Failing()
    fallback = Fallback(failing, model.layers[1])

    def forward() -> torch.Tensor:
        return model.layers[2](fallback(model.layers[0](x))).pow(2).mean()

    expected = backward(forward(), model, x)
    manager = make_manager()
    offload = manager.offload_context([*model.layers, failing, fallback], min_bytes=1)
    for _ in range(3):
        with offload:
            loss = forward()
        assert manager.stats()["device.blocks.current"] == 0, "a layer whose end was not seen keeps its tensors"
        assert equal(backward(loss, model, x), expected)
        del loss
    assert manager.stats()["reloads_on_demand.total"] == 0


def test_a_context_that_was_entered_twice_goes_on(device: str, make_manager: MakeManager) -> None:
    """The second enter is refused, and the forward it was meant to interrupt is as if it had not been."""
    model, x = small_stack(2, device)
    expected = backward(model(x), model, x)
    manager = make_manager()
    offload = manager.offload_context(model.layers, min_bytes=1)
    for _ in range(2):
        with offload:
            with pytest.raises(RuntimeError, match="entered already; make a second one"):
                offload.__enter__()
            loss = model(x)
        assert equal(backward(loss, model, x), expected)
        del loss
    assert manager.stats()["reloads_on_demand.total"] == 0
    assert is_empty(manager)


def test_a_forward_inside_a_context_of_another_one(device: str, make_manager: MakeManager) -> None:
    """The inner context's layers are the inner one's while it lasts, and the outer one goes on afterwards."""
    torch.manual_seed(0)
    layers = [Layer(16).to(device) for _ in range(3)]
    owner = nn.ModuleList(layers)
    x = torch.randn(32, 16).to(device).requires_grad_()

    def forward(*contexts: Any) -> torch.Tensor:
        y = layers[0](x)
        for context in contexts:
            context.__enter__()
        y = layers[1](y)
        for context in reversed(contexts):
            context.__exit__(None, None, None)
        return layers[2](y).pow(2).mean()

    expected = backward(forward(), owner, x)
    for same_manager in (True, False):
        manager = make_manager()
        other: TieringManager = manager if same_manager else make_manager()
        outer = manager.offload_context(layers, min_bytes=1)
        inner = other.offload_context([layers[1]], min_bytes=1)
        for _ in range(2):
            with outer:
                loss = forward(inner)
            moved = [int(m.stats()["offloaded.bytes.total"]) for m in (manager, other)]
            assert equal(backward(loss, owner, x), expected)
            del loss
        if not same_manager:
            assert moved[0] == 2 * moved[1], "the inner manager has one layer of the three"

"""Compiled layers and models: the same gradients as when compiled without a context, and never silently others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters

from tests.conftest import MakeManager
from tests.models import Stack, backward, equal, is_empty, small_stack

pytestmark = [
    pytest.mark.usefixtures("no_gc", "fresh_compiler"),
    pytest.mark.once(why="what a compiler sees is the same in each schedule"),
]


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing is compiled before the test, and nothing is left of it."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()  # an optimizer beside the next forward looks there for what is compiled


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def in_place(model: Stack, **options: Any) -> nn.Module:
    for layer in model.layers:
        layer.compile(**options)
    return model


def wrapped(model: Stack, **options: Any) -> nn.Module:
    model.layers = nn.ModuleList(torch.compile(layer, **options) for layer in model.layers)
    return model


def whole(model: Stack, **options: Any) -> nn.Module:
    compiled: nn.Module = torch.compile(model, **options)
    return compiled


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("make", [in_place, wrapped])
def test_compiled_layers(
    device: str, make_manager: MakeManager, make: Callable[..., nn.Module], backend: str, fullgraph: bool
) -> None:
    """One graph for all layers and all forwards, whose tensors move on schedule."""
    model, x = small_stack(2, device)
    forward = make(model, backend=backend, fullgraph=fullgraph)
    expected = backward(forward(x), model, x)
    manager = make_manager()
    offload = manager.offload_context(model.layers, min_bytes=1)
    for _ in range(3):
        with offload:
            loss = forward(x)
        assert equal(backward(loss, model, x), expected)
        del loss
    assert graphs() == 1
    # Norm's statistics, its output, up's output and its gelu, of both layers, and the second one's input.
    assert int(manager.stats()["offloaded.bytes.total"]) >= 3 * 2 * 10 * x.nbytes
    assert manager.stats()["reloads_on_demand.total"] == 0


@pytest.mark.parametrize("how", ["cheap", "full"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("make", [in_place, wrapped])
def test_compiled_layers_that_are_computed_again(
    device: str, make_manager: MakeManager, make: Callable[..., nn.Module], backend: str, how: Any
) -> None:
    model, x = small_stack(3, device)
    forward = make(model, backend=backend)
    expected = backward(forward(x), model, x)
    manager = make_manager(0)
    offload = manager.offload_context(model.layers, min_bytes=1, recompute=how)
    for _ in range(5):  # each layer has its trial in one of the first
        with offload:
            loss = forward(x)
        assert equal(backward(loss, model, x), expected)
        del loss
    (kind,) = manager._contexts._recomputer._kinds.values()
    assert (kind.excluded, len(kind.equal)) == (None, 3)


@pytest.mark.parametrize("make", [in_place, whole])
def test_compiled_in_the_context_first(
    device: str, make_manager: MakeManager, make: Callable[..., nn.Module]
) -> None:
    """What was compiled with the hooks on the layers is right without them, and with those of the next forward."""
    model, x = small_stack(2, device)
    expected = backward(model(x), model, x)
    forward = make(model, backend="aot_eager")
    manager = make_manager()
    offload = manager.offload_context(model.layers, min_bytes=1)
    for step in range(4):
        if step == 2:
            assert equal(backward(forward(x), model, x), expected)
        before = int(manager.stats()["offloaded.bytes.total"])
        with offload:
            loss = forward(x)
        assert int(manager.stats()["offloaded.bytes.total"]) - before >= 2 * 10 * x.nbytes
        assert equal(backward(loss, model, x), expected)
        del loss
    assert graphs() == 1
    assert manager.stats()["reloads_on_demand.total"] == 0


def test_a_whole_model_that_was_compiled_before(
    device: str, make_manager: MakeManager, caplog: pytest.LogCaptureFixture
) -> None:
    """It has no layers any more: nothing moves, a line says so, and the gradients are right."""
    model, x = small_stack(2, device)
    forward = whole(model, backend="aot_eager")
    expected = backward(forward(x), model, x)
    manager = make_manager()
    offload = manager.offload_context(model.layers, min_bytes=1)
    for _ in range(2):
        with offload:
            loss = forward(x)
        assert equal(backward(loss, model, x), expected)
        del loss
    assert manager.stats()["offloaded.bytes.total"] == 0
    (record,) = (each for each in caplog.records if each.name.startswith("tiered_mem"))
    assert "none of the layers was called, and nothing moves" in record.getMessage()


@pytest.mark.parametrize("attached", [False, True])
def test_one_graph_of_a_whole_model_is_refused(
    attached: bool, device: str, make_manager: MakeManager, caplog: pytest.LogCaptureFixture
) -> None:
    """And the model runs, once it is compiled as it should be."""
    model, x = small_stack(2, device)
    expected = backward(model(x), model, x)
    manager = make_manager()
    offload: Any = manager.offload_context(model.layers, min_bytes=1)
    if attached:
        manager.attach(model, min_bytes=1)
        offload = nullcontext()
    if attached and torch.__version__ < (2, 12):
        whole(model, backend="eager", fullgraph=True)(x)
        assert "none of the layers was called, and nothing moves" in caplog.text
        return  # such a graph leaves hooks out
    refused = pytest.raises(Unsupported, match="tiered_mem moves tensors here: compile the layers, not the model")
    with refused, offload:
        whole(model, backend="eager", fullgraph=True)(x)
    forward = in_place(model, backend="eager", fullgraph=True)
    with offload:
        loss = forward(x)
    assert equal(backward(loss, model, x), expected)


def test_compiled_layers_in_a_layer_context(device: str, make_manager: MakeManager) -> None:
    model, x = small_stack(2, device)
    in_place(model, backend="aot_eager", fullgraph=True)
    expected = backward(model(x), model, x)
    manager = make_manager()
    context = manager.layer_context(2, min_bytes=1)
    for _ in range(3):
        y = x
        for layer in model.layers:
            with context:
                y = layer(y)
            y = context.sync(y)
        assert equal(backward(y.pow(2).mean(), model, x), expected)
        del y
    assert graphs() == 1
    assert int(manager.stats()["offloaded.blocks.total"]) > 0
    assert manager.stats()["reloads_on_demand.total"] == 0


@pytest.mark.usefixtures("careless")
def test_an_in_place_change_of_what_a_compiled_layer_saved_is_refused(
    device: str, make_manager: MakeManager
) -> None:
    x = torch.randn(32, 16).to(device).requires_grad_()
    layer = nn.Tanh()
    layer.compile(backend="aot_eager")
    with make_manager().offload_context([layer], min_bytes=1):
        y = layer(x)
        y.detach().add_(1)
    with pytest.raises(RuntimeError, match="in place between forward and backward"):
        y.sum().backward()


def test_a_compiled_backward(device: str, make_manager: MakeManager) -> None:
    """Compiled autograd calls our hooks as they are, outside of its graph."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Tanh(), nn.Linear(16, 16), nn.Sigmoid()).to(device)
    x = torch.randn(32, 16).to(device).requires_grad_()
    expected = backward(model(x).sum(), model, x)
    manager = make_manager(in_flight=1)
    offload = manager.offload_context(list(model), min_bytes=1)
    for _ in range(3):
        with offload:
            loss = model(x).sum()
        with compiled_autograd._enable(torch.compile(backend="eager")):
            assert equal(backward(loss, model, x), expected)
        del loss
        assert is_empty(manager)
    assert counters["compiled_autograd"]["captures"] == 1
    assert manager.stats()["offloaded.bytes.total"] == 3 * 2 * x.nbytes
    assert manager.stats()["reloads_on_demand.total"] == 0

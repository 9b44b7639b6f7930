"""Nothing moves while a graph is captured: what would is refused, and the manager is as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.conftest import MakeManager
from tests.models import stack
from tiered_mem import OffloadRefused, TieringManager

REFUSED = "moves nothing while a graph is captured"


def module_of(device: str) -> Any:
    """torch.npu or torch.cuda."""
    module = getattr(torch, device, None)
    if module is None or not hasattr(module, "graph"):
        pytest.skip(f"{device} has no graphs")
    return module


def captured(device: str, work: Callable[[], object], stream: Any = None) -> Any:
    """The graph, captured on that stream."""
    module = module_of(device)
    graph = module.NPUGraph() if device == "npu" else module.CUDAGraph()
    with module.graph(graph, stream=stream):
        work()
    # torch_npu 2.9 gives each graph a seed, on the capturing stream, and another when it is replayed on any other.
    module.synchronize()
    return graph


def refused(device: str, work: Callable[[], object], stream: Any = None) -> None:
    def try_it() -> None:
        with pytest.raises(OffloadRefused, match=REFUSED):
            work()

    captured(device, try_it, stream)


@pytest.fixture
def three_layers(make_manager: MakeManager) -> TieringManager:
    return make_manager(3)


def gradients(model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_a_forward_in_a_capture_is_refused_and_the_next_step_moves(
    device: str, three_layers: TieringManager
) -> None:
    model, x = stack(3, device)
    expected = gradients(model, x)

    def forward() -> None:
        with three_layers.offload_context(model.layers):
            model(x)

    refused(device, forward)
    with three_layers.offload_context(model.layers):
        loss = model(x)
    model.zero_grad()
    loss.backward()
    assert all(
        torch.equal(parameter.grad, grad) for parameter, grad in zip(model.parameters(), expected, strict=True)
    )
    assert three_layers.stats()["offloaded.bytes.total"] > 0


def test_a_backward_in_a_capture_is_refused_where_blocks_have_left(
    device: str, three_layers: TieringManager
) -> None:
    model, x = stack(3, device)
    module = module_of(device)
    stream = module.Stream()
    stream.wait_stream(module.current_stream())
    with module.stream(stream), three_layers.offload_context(model.layers):  # backward is on the forward's stream
        loss = model(x)
    assert three_layers.stats()["released.bytes.total"] > 0
    refused(device, loss.backward, stream)


def test_a_model_is_captured_outside_the_contexts_beside_blocks_that_have_left(
    device: str, three_layers: TieringManager
) -> None:
    model, x = stack(3, device)
    other, y = stack(2, device)
    expected = gradients(model, x)
    model.zero_grad()
    with three_layers.offload_context(model.layers):
        loss = model(x)
    result = torch.zeros((), device=device)
    graph = captured(device, lambda: result.copy_(other(y).detach()))
    graph.replay()
    assert result.item() == other(y).item()
    loss.backward()
    assert all(
        torch.equal(parameter.grad, grad) for parameter, grad in zip(model.parameters(), expected, strict=True)
    )

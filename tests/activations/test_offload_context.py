"""What the offload context promises: the same gradients, less memory, and nothing left behind."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.conftest import MakeManager
from tests.models import eventually, is_empty, same, stack, take_gradients
from tiered_mem import Closed

LAYERS = 6

pytestmark = pytest.mark.usefixtures("no_gc")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_flight", [0, 1])
@pytest.mark.parametrize("num_layers", [0, 1, LAYERS // 2, LAYERS - 1, LAYERS])
def test_gradients_are_bit_equal(
    device: str, make_manager: MakeManager, num_layers: int, in_flight: int, dtype: torch.dtype
) -> None:
    model, x = stack(LAYERS, device, dtype)
    model(x).backward()
    expected = take_gradients(model)
    manager = make_manager(num_layers, in_flight=in_flight)
    offload = manager.offload_context(model.layers, min_bytes=1024)
    for _ in range(3):
        with offload:
            loss = model(x)
        loss.backward()
        assert same(take_gradients(model), expected)
        del loss
    stats = manager.stats()
    assert (int(stats["reloaded.blocks.total"]) > 0) == (num_layers > 0)
    assert stats["reloads_on_demand.total"] == 0, "the policy was not told of backward in time"


@pytest.mark.parametrize("num_layers", [1, LAYERS // 2, LAYERS - 1, LAYERS])
def test_the_layers_that_are_not_offloaded_are_resident_after_the_forward(
    device: str, device_module: Any, make_manager: MakeManager, num_layers: int
) -> None:
    model, x = stack(LAYERS, device)
    before = device_module.memory_allocated()
    loss = model(x)
    plain = device_module.memory_allocated() - before
    del loss
    with make_manager(num_layers).offload_context(model.layers, min_bytes=1024):
        loss = model(x)
    resident = device_module.memory_allocated() - before
    # What the loss saves is there in any case: the last layer's output, of which x has the size.
    of_layers = plain - x.nbytes
    assert resident - x.nbytes == pytest.approx(of_layers * (LAYERS - num_layers) / LAYERS, abs=0.05 * of_layers)
    del loss


def test_backward_holds_no_more_layers_than_forward(
    device: str, device_module: Any, make_manager: MakeManager
) -> None:
    model, x = stack(LAYERS, device)
    device_module.reset_peak_memory_stats()
    before = device_module.memory_allocated()
    model(x).backward()
    plain = device_module.max_memory_allocated() - before
    model.zero_grad()
    offload = make_manager(LAYERS - 1).offload_context(model.layers, min_bytes=1024)
    device_module.reset_peak_memory_stats()
    with offload:
        loss = model(x)
    loss.backward()
    # One layer resident, one whose copy has been issued and whose gradients are computed.
    assert device_module.max_memory_allocated() - before < plain * 3 / LAYERS


def test_an_exception_in_forward_leaves_nothing(device: str, make_manager: MakeManager) -> None:
    model, x = stack(LAYERS, device)
    model(x).backward()
    expected = take_gradients(model)
    manager = make_manager()
    offload = manager.offload_context(model.layers, min_bytes=1024)

    def fail(module: torch.nn.Module, inputs: object) -> None:
        raise KeyboardInterrupt

    hook = model.layers[3].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt), offload:
        model(x)
    hook.remove()
    assert is_empty(manager)

    with offload:
        loss = model(x)
    loss.backward()
    assert same(take_gradients(model), expected)


def test_an_exception_in_backward_leaves_nothing(device: str, make_manager: MakeManager) -> None:
    model, x = stack(LAYERS, device)
    offload = make_manager().offload_context(model.layers, min_bytes=1024)

    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("broken hook")

    with offload:
        loss = model(x)
    handle = model.layers[2].up.weight.register_hook(fail)
    with pytest.raises(ValueError, match="broken hook"):
        loss.backward()
    handle.remove()


def test_a_forward_without_backward_leaves_nothing(device: str, make_manager: MakeManager) -> None:
    model, x = stack(LAYERS, device)
    manager = make_manager()
    with manager.offload_context(model.layers, min_bytes=1024):
        loss = model(x)
    assert int(manager.stats()["host.slots"]) > 0
    del loss
    assert is_empty(manager)


def test_evaluation_saves_nothing(device: str, make_manager: MakeManager) -> None:
    model, x = stack(LAYERS, device)
    manager = make_manager()
    with torch.no_grad(), manager.offload_context(model.layers, min_bytes=1024):
        model(x)
    assert manager.stats()["offloaded.blocks.total"] == 0


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_several_graphs_in_flight(device: str, make_manager: MakeManager, order: tuple[int, ...]) -> None:
    model, _ = stack(LAYERS, device)
    inputs = [torch.randn(16, 128, 64).to(device) for _ in range(3)]
    expected = []
    for x in inputs:
        model(x).backward()
        expected.append(take_gradients(model))
    offload = make_manager(4).offload_context(model.layers, min_bytes=1024)
    losses = []
    for x in inputs:
        with offload:
            losses.append(model(x))
    for graph in order:
        losses[graph].backward()
        assert same(take_gradients(model), expected[graph])


def test_a_graph_can_be_used_twice(device: str, make_manager: MakeManager) -> None:
    model, x = stack(LAYERS, device)
    model(x).backward()
    expected = take_gradients(model)
    with make_manager().offload_context(model.layers, min_bytes=1024):
        loss = model(x)
    loss.backward(retain_graph=True)
    assert same(take_gradients(model), expected)
    loss.backward()
    assert same(take_gradients(model), expected)


def test_a_full_host_tier_keeps_activations_on_the_device(
    device: str, make_manager: MakeManager, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = stack(LAYERS, device)
    model(x).backward()
    expected = take_gradients(model)
    manager = make_manager(host_bytes="8MiB")
    offload = manager.offload_context(model.layers, min_bytes=1024)
    for _ in range(2):
        with offload:
            loss = model(x)
        loss.backward()
        assert same(take_gradients(model), expected)
    stats = manager.stats()
    assert int(stats["kept.blocks.total"]) > 0
    assert int(stats["host.used.peak"]) <= 8 << 20
    warnings = [record.message for record in caplog.records if "stays on the device" in record.message]
    assert len(warnings) == 1
    assert "limit 8.0 MiB" in warnings[0]
    del loss


def test_an_activation_larger_than_the_host_tier_stays_on_the_device(
    device: str, make_manager: MakeManager, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = stack(2, device)
    manager = make_manager(host_bytes="64KiB")
    with manager.offload_context(model.layers, min_bytes=1024):
        loss = model(x)
    loss.backward()
    assert manager.stats()["offloaded.bytes.total"] <= 64 << 10
    assert "can never fit: raise host_bytes" in caplog.text


def test_two_managers_side_by_side(device: str, make_manager: MakeManager) -> None:
    model, x = stack(LAYERS, device)
    model(x).backward()
    expected = take_gradients(model)
    first, second = make_manager(2), make_manager()
    losses = []
    for manager in (first, second):
        with manager.offload_context(model.layers, min_bytes=1024):
            losses.append(model(x))
    for loss in losses:
        loss.backward()
        assert same(take_gradients(model), expected)
    losses.clear()
    del loss


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_layers(device: str, make_manager: MakeManager, use_reentrant: bool) -> None:
    model, x = stack(3, device)
    x.requires_grad_()

    def forward() -> torch.Tensor:
        y = x
        for layer in model.layers:
            y = checkpoint(layer, y, use_reentrant=use_reentrant)
        return y.pow(2).mean()

    forward().backward()
    expected = take_gradients(model)
    with make_manager().offload_context(model.layers, min_bytes=1024):
        loss = forward()
    loss.backward()
    assert same(take_gradients(model), expected)


def test_autocast(device: str, make_manager: MakeManager) -> None:
    model, x = stack(3, device)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = model(x)
    loss.backward()
    expected = take_gradients(model)
    with make_manager().offload_context(model.layers, min_bytes=1024), torch.autocast(device, dtype=torch.bfloat16):
        loss = model(x)
    loss.backward()
    assert same(take_gradients(model), expected)


def test_a_gradient_of_a_gradient(device: str, make_manager: MakeManager) -> None:
    model, x = stack(3, device)
    x.requires_grad_()

    def penalty(loss: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(loss, x, create_graph=True)[0].pow(2).sum()

    penalty(model(x)).backward()
    expected = take_gradients(model)
    with make_manager().offload_context(model.layers, min_bytes=1024):
        loss = model(x)
    penalty(loss).backward()
    assert same(take_gradients(model), expected)
    del loss


def test_entering_twice_is_refused(device: str, make_manager: MakeManager) -> None:
    model, _ = stack(1, device)
    offload = make_manager().offload_context(model.layers)
    with offload, pytest.raises(RuntimeError, match="entered already"), offload:
        pass


def test_hooks_are_gone_after_the_forward(device: str, make_manager: MakeManager) -> None:
    model, x = stack(2, device)
    with make_manager().offload_context(model.layers):
        model(x)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.layers)


def test_a_forward_is_forgotten_with_its_graph(device: str, make_manager: MakeManager) -> None:
    model, x = stack(2, device)
    with make_manager().offload_context(model.layers, min_bytes=1024):
        loss = model(x)
    loss.backward()
    del loss
    assert eventually(lambda: not any(type(thing).__name__ == "_Forward" for thing in gc.get_objects()))


def test_closing_before_backward_is_told(device: str, make_manager: MakeManager) -> None:
    model, x = stack(2, device)
    manager = make_manager()
    offload = manager.offload_context(model.layers, min_bytes=1024)
    with offload:
        loss = model(x)
    manager.close()
    with pytest.raises(Closed, match="before this backward"):
        loss.backward()
    with pytest.raises(Closed, match="make a new one"):
        offload.__enter__()


def test_training_on_another_stream(device: str, device_module: Any, make_manager: MakeManager) -> None:
    model, x = stack(LAYERS, device)
    model(x).backward()
    expected = take_gradients(model)
    offload = make_manager().offload_context(model.layers, min_bytes=1024)
    stream = device_module.Stream()
    stream.wait_stream(device_module.current_stream())
    with device_module.stream(stream):
        for _ in range(3):
            with offload:
                loss = model(x)
            loss.backward()
            assert same(take_gradients(model), expected)
            del loss

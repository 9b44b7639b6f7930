"""What the offload context promises: the same gradients, less memory, and nothing left behind."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.models import eventually, same, stack, take_gradients
from tiered_mem import ChangedTensor, Closed, TieringManager
from tiered_mem.policies import LayerOrderPolicy

LAYERS = 6
MakeManager = Callable[..., TieringManager]

pytestmark = pytest.mark.usefixtures("no_gc")


@pytest.fixture
def make_manager(device: str) -> Iterator[MakeManager]:
    """Makes managers for all the model's layers unless told otherwise; at the end nothing may be left in them."""
    managers: list[TieringManager] = []

    def make(num_layers: int | None = None, *, in_flight: int = 0, host_bytes: str = "64MiB") -> TieringManager:
        policy = LayerOrderPolicy(num_layers, in_flight=in_flight)
        managers.append(TieringManager(policy=policy, device=device, host_bytes=host_bytes))
        return managers[-1]

    yield make
    for manager in managers:
        assert eventually(lambda manager=manager: is_empty(manager)), manager.memory_summary()
        manager.close()


def is_empty(manager: TieringManager) -> bool:
    """Whether all slots are back in the pool and no block is known."""
    manager.synchronize()
    stats = manager.stats()
    blocks = sum(int(count) for name, count in stats.items() if name.endswith("blocks.current"))
    return blocks == stats["host.slots"] == stats["host.used.current"] == 0


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


@pytest.mark.parametrize("min_bytes", [1, 1 << 30])
def test_an_operation_that_saves_its_output_is_no_cycle(
    device: str, device_module: Any, make_manager: MakeManager, min_bytes: int
) -> None:
    """Such an output, kept as it is, would own the node that keeps it: a cycle, for the garbage collector alone."""
    x = torch.randn(256, 1024).to(device).requires_grad_()
    layer = torch.nn.Sigmoid()
    before = device_module.memory_allocated()
    with make_manager(0).offload_context([layer], min_bytes=min_bytes):
        y = layer(x).exp()
    del y
    assert device_module.memory_allocated() == before


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


def test_weights_stay_on_the_device(device: str, make_manager: MakeManager) -> None:
    model, x = stack(1, device)
    saved = [0]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        saved[0] += tensor.untyped_storage().data_ptr() not in weights and tensor.nbytes >= 1024
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.layers[0](x).sum().backward()
    model.zero_grad()
    manager = make_manager()
    with manager.offload_context(model.layers, min_bytes=1024):
        model.layers[0](x).sum().backward()
    # The norm's output is saved by nobody twice here, so that there is a block for each saved activation.
    assert manager.stats()["offloaded.blocks.total"] == saved[0]


def test_buffers_and_other_modules_weights_stay_too(device: str, make_manager: MakeManager) -> None:
    """A weight that is tied to another module's arrives as a view of that module's parameter."""
    embedding = torch.nn.Embedding(256, 64).to(device)

    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.randn(256))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, embedding.weight) * self.scale

    head = Head().to(device)
    x = torch.randn(512, 64).to(device).requires_grad_()
    manager = make_manager()
    with manager.offload_context([head], min_bytes=1024):
        loss = head(x).sum()
    assert manager.stats()["offloaded.bytes.total"] == x.nbytes
    loss.backward()


def test_conjugate_views_keep_their_meaning() -> None:
    """Such a view has the bytes of its original, and a bit that says to read them otherwise."""

    class Rotate(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.conj() * x * x.imag.neg()).abs().sum()

    layer = Rotate()
    x = torch.randn(64, 64, dtype=torch.complex64, requires_grad=True)
    layer(x).backward()
    expected, x.grad = x.grad, None
    manager = TieringManager(policy="layer-order", device="cpu", host_bytes="16MiB")
    with manager.offload_context([layer], min_bytes=1024):
        loss = layer(x)
    loss.backward()
    assert torch.equal(x.grad, expected)
    manager.close()


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


@pytest.mark.parametrize("num_layers", [0, 2])
def test_a_saved_tensor_that_was_changed_is_refused(
    device: str, make_manager: MakeManager, num_layers: int
) -> None:
    """Autograd itself refuses this, and hooks switch its check off. The gradient would be silently wrong."""
    layers = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Identity()])
    x = torch.randn(64, 64).to(device).requires_grad_()
    with make_manager(num_layers).offload_context(layers, min_bytes=1024):
        with torch.no_grad():
            layers[1](x)  # layers are known by their calls
        y = _square_in_layer(layers[0], x + 1)
    with pytest.raises(ChangedTensor, match=r"\(64, 64\)"):
        y.sum().backward()


def _square_in_layer(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    results: list[torch.Tensor] = []

    def square(module: torch.nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        results.append(inputs[0] * inputs[0])
        inputs[0].add_(1)

    handle = layer.register_forward_hook(square, prepend=True)
    layer(x)
    handle.remove()
    return results[0]


def test_a_change_after_the_release_does_no_harm(device: str, make_manager: MakeManager) -> None:
    """By then the contents are safe on the host: the right gradient, where plain autograd gives an error."""
    model, x = stack(2, device)
    x.requires_grad_()
    model(x).backward()
    expected, expected_input = take_gradients(model), x.grad.cpu()
    x.grad = None
    y = x.detach().clone().requires_grad_()
    copied = y * 1
    with make_manager().offload_context(model.layers, min_bytes=1024):
        loss = model(copied)
    copied.detach().zero_()
    loss.backward()
    assert same(take_gradients(model), expected)
    assert torch.equal(y.grad.cpu(), expected_input)


def test_views_of_one_storage_are_moved_once(device: str, make_manager: MakeManager) -> None:
    class Split(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b, c = (x * 2).view(-1, 3, 32).permute(1, 0, 2).unbind(0)
            return (a * b * c).sum()

    layer = Split()
    x = torch.randn(512, 96).to(device).requires_grad_()
    layer(x).backward()
    expected, x.grad = x.grad.cpu(), None
    manager = make_manager()
    with manager.offload_context([layer], min_bytes=1024):
        loss = layer(x)
    # x * 2 with its three views, and a * b.
    assert manager.stats()["offloaded.bytes.total"] == x.nbytes + x.nbytes // 3
    loss.backward()
    assert torch.equal(x.grad.cpu(), expected)


def test_a_small_view_moves_its_own_bytes(device: str, make_manager: MakeManager) -> None:
    class Slice(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:8].square().sum()

    x = torch.randn(512, 96).to(device)
    y = (x * 1).requires_grad_()
    manager = make_manager()
    layer = Slice()
    with manager.offload_context([layer], min_bytes=1024):
        loss = layer(y)
    assert manager.stats()["offloaded.bytes.total"] == 8 * 96 * 4
    loss.backward()
    expected = torch.zeros(512, 96)
    expected[:8] = 2 * x[:8].cpu()
    assert torch.equal(y.grad.cpu(), expected)


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

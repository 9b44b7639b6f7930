"""Which saved tensors move, as what, and that each comes back as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conftest import MakeManager
from tests.models import same, stack, take_gradients
from tiered_mem import ChangedTensor, TieringManager

pytestmark = pytest.mark.usefixtures("no_gc")


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

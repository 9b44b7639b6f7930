"""Which saved tensors move: each activation once, and no weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.activations.saving import SIZE, Apply, assert_same, leaf, moved_by
from tests.conftest import MakeManager
from tests.models import backward, equal, stack

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


def test_what_several_layers_save_moves_once(device: str, make_manager: MakeManager) -> None:
    """With the last of them, where it is still on the device then: until then it is needed there."""
    x = leaf(device)
    layers = torch.nn.ModuleList(Apply(lambda y, z: y.tanh() * z) for _ in range(3))
    manager = make_manager(in_flight=1)

    def forward() -> torch.Tensor:
        z = x * 2
        y = z
        for layer in layers:
            y = layer(y, z)
        return y.sum()

    expected = backward(forward(), x)
    offload = manager.offload_context(layers, min_bytes=1)
    with offload:
        loss = forward()
    assert moved_by(manager) == 4 * x.nbytes  # z, and a tanh in each layer
    assert equal(backward(loss, x), expected)


@pytest.mark.parametrize(
    "function",
    [
        torch.exp_,
        lambda x: x.mul(3).sigmoid_().mul(2).tanh_(),
        lambda x: x.mul(2).relu_(),
        lambda x: torch.nn.functional.dropout(x, 0.0, inplace=True).exp(),
        lambda x: x.exp().add(1),
        lambda x: x.softmax(-1).log(),
    ],
)
def test_operations_that_save_their_output(
    device: str, make_manager: MakeManager, function: Callable[..., torch.Tensor]
) -> None:
    moved = assert_same(make_manager(), Apply(function), leaf(device))
    assert moved >= SIZE


class Weighty(torch.nn.Module):
    """Saves its weights and buffers in every disguise."""

    def __init__(self, tied: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(96, 96) / 10)
        self.tied = tied
        self.scale = torch.nn.Parameter(torch.randn(96, 96))
        self.register_buffer("mask", torch.rand(96, 96))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.weight.detach() + x @ self.weight.t() + x @ self.tied.view(-1).view(96, 96)
        x = x + x.detach() @ self.weight.data[:96] @ self.scale
        return x.sum() * self.scale.detach().view(-1)[:4800].sum() + (x[:1] * self.mask * self.scale).sum()


def test_weights_stay_in_every_disguise(device: str, make_manager: MakeManager) -> None:
    torch.manual_seed(0)
    layer = Weighty(torch.nn.Parameter(torch.randn(96, 96) / 10)).to(device)
    weights = {t.untyped_storage()._cdata for t in (*layer.parameters(), *layer.buffers())}
    activations: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage()._cdata not in weights:
            activations[tensor.untyped_storage()._cdata] = tensor.detach()
        return tensor

    x = leaf(device)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x * 2)
    spans = {number: tensor.untyped_storage().nbytes() for number, tensor in activations.items()}
    moved = assert_same(make_manager(), layer, x)
    assert moved == sum(spans.values())

"""Which saved tensors move, as what, and that each comes back as it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.conftest import MakeManager
from tests.models import backward, equal, gradients_of, is_empty, same, stack, take_gradients
from tiered_mem import ChangedTensor, TieringManager
from tiered_mem.policies import Action, Event, ManualPolicy, Offload, Release, Reload, Saved

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


class Apply(torch.nn.Module):
    """A layer of one function."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(*inputs)


SIZE = 64 * 96 * 4


def leaf(device: str, *shape: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(shape or (64, 96)).to(device).requires_grad_()


def moved_by(manager: TieringManager) -> int:
    return int(manager.stats()["offloaded.bytes.total"])


def assert_same(manager: TieringManager, layer: torch.nn.Module, *inputs: torch.Tensor, min_bytes: int = 1) -> int:
    """Two steps of the layer, called between two other operations, have the gradients of a plain step.

    Returns the bytes that moved in a step.
    """
    owners = (layer, *inputs)

    def forward() -> torch.Tensor:
        return layer(*(each * 2 for each in inputs)).float().pow(2).sum()

    expected = backward(forward(), *owners)
    offload = manager.offload_context([layer], min_bytes=min_bytes)
    for step in range(1, 3):
        with offload:
            loss = forward()
        moved = moved_by(manager)
        assert moved % step == 0
        assert equal(backward(loss, *owners), expected)
        del loss
    return moved // 2


@pytest.mark.parametrize(
    ("function", "nbytes"),
    [
        (lambda x: x.t() * x.t().sigmoid(), 2 * SIZE),
        (lambda x: x[:, ::2] * x[:, 1::2], SIZE),
        (lambda x: x[8:16] * x[8:16], 8 * 96 * 4),
        (lambda x: x[8:16] * x[40:48], 2 * 8 * 96 * 4),
        (lambda x: x[8:16].t().square(), 8 * 96 * 4),
        (lambda x: x[1:9, 3:5].square(), (7 * 96 + 2) * 4),
        (lambda x: x[:1].expand(64, 96) * x.tanh(), SIZE + 96 * 4),
        (lambda x: x[:0] * x[:0], 0),
        (lambda x: x[3, 5].exp() * x[3, 5], 2 * 4),
        (lambda x: x.view(-1)[7:].unfold(0, 16, 8).square(), SIZE),
        (lambda x: x.flip(0).reshape(96, 64).permute(1, 0).contiguous() * x, 2 * SIZE),
        (lambda x: x.view(4, 16, 96).transpose(0, 2).diagonal(dim1=0, dim2=2).square(), None),
    ],
    ids=[
        "transposed",
        "strided",
        "slice",
        "slices",
        "slice_transposed",
        "window",
        "broadcast",
        "empty",
        "scalar",
        "unfold",
        "copies",
        "diagonal",
    ],
)
def test_saved_views(
    device: str, make_manager: MakeManager, function: Callable[..., torch.Tensor], nbytes: int | None
) -> None:
    manager = make_manager()
    moved = assert_same(manager, Apply(function), leaf(device))
    assert nbytes is None or moved == nbytes
    assert nbytes == 0 or moved > 0


def test_a_broadcast_tensor_counts_by_its_storage(device: str, make_manager: MakeManager) -> None:
    """It is large, and there is little to gain."""
    manager = make_manager()
    row = leaf(device, 96)
    x = leaf(device)
    layer = Apply(lambda x, row: x * row.expand(64, 96))
    assert assert_same(manager, layer, x, row, min_bytes=1024) == x.nbytes


@pytest.mark.parametrize("num_layers", [0, 1])
def test_a_small_view_of_what_another_layer_saves(device: str, make_manager: MakeManager, num_layers: int) -> None:
    """Whether or not its layer is offloaded, and whichever of the two is saved first."""

    def forward(y: torch.Tensor) -> torch.Tensor:
        return second(first(y * 1)[8:16]).sum()

    for function in (torch.square, lambda y: y * y[8:16].repeat(8, 1)):
        x = leaf(device)
        first, second = Apply(function), Apply(lambda y: y.square() * y)
        expected = backward(forward(x), x)
        offload = make_manager(num_layers).offload_context([first, second], min_bytes=1)
        for _ in range(2):
            with offload:
                loss = forward(x)
            assert equal(backward(loss, x), expected)
            del loss


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


def test_one_storage_under_two_dtypes(device: str, make_manager: MakeManager) -> None:
    """A mask kept as bits of the same memory, saved first or second."""

    class Bits(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, first: bool) -> torch.Tensor:
            y = x * 1
            bits = y.view(torch.int32)
            halves = y.view(torch.float16)[8:16]
            ctx.save_for_backward(*((bits, y) if first else (y, bits)), halves)
            ctx.first = first
            return y * 1

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            one, two, halves = ctx.saved_tensors
            bits, y = (one, two) if ctx.first else (two, one)
            assert (bits.dtype, y.dtype, halves.dtype) == (torch.int32, torch.float32, torch.float16)
            assert torch.equal(bits.cpu(), y.cpu().view(torch.int32))
            assert torch.equal(halves.cpu().view(torch.int16), y.cpu()[8:16].view(torch.int16))
            return gradient * y, None

    for first in (False, True):
        manager = make_manager()
        moved = assert_same(manager, Apply(lambda x, first=first: Bits.apply(x, first)), leaf(device))
        assert moved == SIZE + SIZE // 8


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


class Change(torch.nn.Module):
    """Saves `y * y`'s input, here called output 0 of MulBackward0, and changes it at the moment of choice."""

    def __init__(self, inside: bool, rows: int) -> None:
        super().__init__()
        self.inside = inside
        self.rows = rows
        self.seen: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x * 3)[: self.rows] * 2
        z = y * y
        self.seen = y.detach()
        if self.inside:
            y.detach().add_(1)
        return z


WHAT = r"saved torch.float32 tensor of shape \({rows}, 96\), output 0 of MulBackward0, was changed in place"


@pytest.mark.usefixtures("careless")
@pytest.mark.parametrize(
    ("num_layers", "min_bytes", "inside", "rows"),
    [
        (0, 1, True, 64),
        (0, 1, False, 64),
        (2, 1, True, 64),
        (1, 1, False, 64),
        (2, 1 << 20, True, 64),
        (2, 1 << 20, False, 64),
        (0, 1, False, 2),
    ],
    ids=["kept", "kept_later", "before_offload", "after_offload", "small", "small_later", "slice_later"],
)
def test_the_error_names_the_tensor_that_was_changed(
    device: str, make_manager: MakeManager, num_layers: int, min_bytes: int, inside: bool, rows: int
) -> None:
    x = leaf(device)
    layer, last = Change(inside, rows), torch.nn.Identity()
    with make_manager(num_layers).offload_context([layer, last], min_bytes=min_bytes):
        y = layer(x)
        if not inside and layer.seen is not None:
            layer.seen.add_(1)
        loss = last(y).sum()
    with pytest.raises(ChangedTensor, match=WHAT.format(rows=rows)):
        loss.backward()
    layer.seen = None


def test_sigmoid_whose_output_is_changed_is_refused(device: str, make_manager: MakeManager) -> None:
    x = leaf(device)
    layer = Apply(lambda x: x.sigmoid().add_(1))
    with make_manager().offload_context([layer], min_bytes=1):
        loss = layer(x).sum()
    with pytest.raises(ChangedTensor, match="output 0 of SigmoidBackward0"):
        loss.backward()


@pytest.mark.usefixtures("careless")
def test_what_was_saved_outside_of_the_layers_is_guarded_too(device: str, make_manager: MakeManager) -> None:
    x = leaf(device)
    layer = torch.nn.Identity()
    for change in ("before the layer", "after it"):
        with make_manager().offload_context([layer], min_bytes=1):
            y = x * 2
            z = y.square()
            if change == "before the layer":
                y.detach().add_(1)
            layer(y)  # a layer's input is its own, though it was saved before it
            if change == "after it":
                y.detach().add_(1)
            loss = z.sum()
        with pytest.raises(ChangedTensor, match=r"shape \(64, 96\), output 0 of MulBackward0"):
            loss.backward()


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


@pytest.mark.parametrize("layout", ["sparse", "conj", "neg", "jagged"])
def test_tensors_that_are_more_than_their_bytes_come_back_right(layout: str) -> None:
    """On the CPU, where torch has them all."""
    torch.manual_seed(0)
    x = torch.randn(64, 64, dtype=torch.complex64 if layout in ("conj", "neg") else torch.float32)
    x.requires_grad_()

    def function(x: torch.Tensor) -> torch.Tensor:
        if layout == "sparse":
            return torch.sparse.mm(x.detach().relu().to_sparse(), x * 2) * x
        if layout == "jagged":
            nested = torch.nested.nested_tensor_from_jagged(x * 2, torch.tensor([0, 3, 40, 64]))
            return (nested.sin() * nested).values() * x
        y = x * 2
        return (y.conj() * y.exp()).abs() if layout == "conj" else (y.conj().imag * y.real.exp())

    layer = Apply(function)
    expected = backward(layer(x).sum(), x)
    with TieringManager(policy="layer-order", device="cpu", host_bytes="16MiB") as manager:
        for _ in range(2):
            with manager.offload_context([layer], min_bytes=1):
                loss = layer(x).sum()
            assert moved_by(manager) > 0
            assert equal(backward(loss, x), expected)
            del loss
        assert is_empty(manager)


def test_a_slice_that_is_offloaded_again_after_its_return(device: str) -> None:
    """A policy may send a block out a second time. Its bytes lie elsewhere by then."""

    class Again(ManualPolicy):
        def __init__(self) -> None:
            self.keys: list[int] = []

        def decide(self, event: Event) -> Sequence[Action]:
            if isinstance(event, Saved):
                self.keys.append(event.key)
            return ()

    x = leaf(device)
    layer = Apply(lambda x: x[8:16].square())
    expected = backward((layer(x * 1) * 1).sum(), x)
    policy = Again()
    with TieringManager(policy=policy, device=device, host_bytes="16MiB") as manager:
        with manager.offload_context([layer], min_bytes=1):
            loss = layer(x * 1).sum()
        for last in (False, True):
            manager.act([advice(key) for advice in (Offload, Release, Reload) for key in policy.keys])
            loss.backward(retain_graph=not last)
            assert equal(gradients_of(x), expected)
        assert moved_by(manager) == 2 * 8 * 96 * 4
        del loss
        assert is_empty(manager)

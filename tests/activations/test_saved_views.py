"""Saved views: how much moves of the storage below, and that each comes back as the same view."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.activations.saving import SIZE, Apply, assert_same, leaf, moved_by
from tests.conftest import MakeManager
from tests.models import backward, equal, gradients_of, is_empty
from tiered_mem import TieringManager
from tiered_mem.policies import Action, Event, ManualPolicy, Offload, Release, Reload, Saved

pytestmark = pytest.mark.usefixtures("no_gc")


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
                self.keys.extend(key for key, _ in event.blocks)
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

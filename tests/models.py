"""The small models that the tests train, and what is asked of them afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from tiered_mem import OffloadContext, TieringManager

Forward = Callable[[], torch.Tensor]


class Layer(nn.Module):
    """A residual feed-forward layer. For its backward it saves about 11 tensors of its input's size."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Layers one after the other, and the mean square of what comes out."""

    def __init__(self, layers: int, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


def small_stack(layers: int, device: str) -> tuple[Stack, torch.Tensor]:
    """A model of width 16 and an input that wants a gradient, the same at each call."""
    torch.manual_seed(0)
    return Stack(layers, 16).to(device), torch.randn(32, 16).to(device).requires_grad_()


def stack(layers: int, device: str, dtype: torch.dtype = torch.float32) -> tuple[Stack, torch.Tensor]:
    """A model and an input for it, the same at each call."""
    torch.manual_seed(0)
    model = Stack(layers).to(dtype)
    return model.to(device), torch.randn(16, 128, 64).to(dtype).to(device)


def in_order(model: nn.Module, x: torch.Tensor, order: list[int]) -> Forward:
    """A forward that calls the model's layers by their numbers."""

    def forward() -> torch.Tensor:
        y = x
        for number in order:
            y = model.layers[number](y)
        return y.pow(2).mean()

    return forward


def take_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients by parameter, on the CPU; after this the model has none."""
    gradients = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return gradients


def backward(loss: torch.Tensor, *owners: nn.Module | torch.Tensor) -> list[torch.Tensor]:
    """Runs backward. The gradients of the modules' parameters and of the tensors; afterwards they have none."""
    loss.backward()
    return gradients_of(*owners)


def gradients_of(*owners: nn.Module | torch.Tensor) -> list[torch.Tensor]:
    """The gradients of the modules' parameters and of the tensors, on the CPU; afterwards they have none."""
    leaves = [leaf for o in owners for leaf in (o.parameters() if isinstance(o, nn.Module) else (o,))]
    gradients = [torch.empty(0) if leaf.grad is None else leaf.grad.cpu() for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return gradients


def equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Whether both hold the same bits. A list without any gradient is equal to none."""
    return any(t.numel() for t in some) and all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def same(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    """Whether both hold the same names and the same bits."""
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


def assert_same(forward: Forward, offload: OffloadContext, *owners: nn.Module | torch.Tensor) -> None:
    """Three steps in the context give the gradients of a step without it."""
    expected = backward(forward(), *owners)
    for _ in range(3):
        with offload:
            loss = forward()
        assert equal(backward(loss, *owners), expected)
        del loss


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether the condition comes true, within a minute: autograd's threads let go of a graph when they like."""
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()


def is_empty(manager: TieringManager) -> bool:
    """Whether all slots are back in the pool and no block is known."""
    manager.synchronize()
    stats = manager.stats()
    blocks = sum(int(count) for name, count in stats.items() if name.endswith("blocks.current"))
    return blocks == stats["host.slots"] == stats["host.used.current"] == 0


def is_right_step(manager: TieringManager, device: str) -> bool:
    """Runs a forward and a backward. Whether the gradients are right, to the last bit."""
    model, x = stack(3, device)
    model(x).backward()
    expected = take_gradients(model)
    with manager.offload_context(model.layers, min_bytes=1024):
        loss = model(x)
    loss.backward()
    return same(take_gradients(model), expected)


def allocated() -> int:
    """The bytes of device memory that tensors have. torch.accelerator does not know them of an older torch_npu."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return 0 if device is None else int(torch.get_device_module(device).memory_allocated())

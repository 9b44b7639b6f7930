"""What the tests of Transformer Engine's interface measure, and the tensors they move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import pytest
import torch

from tests.cpu_offload.layers import SHAPE
from tests.cpu_offload.mxfp8 import MXFP8Quantizer, TwoParts, parts_of
from tiered_mem.cpu_offload import OffloadableLayerState, get_cpu_offload_context

LEAST_ELEMENTS = 256 * 1024
MIB = 1 << 20
HOST_BYTES = "16MiB"
KINDS = ("plain", "mxfp8", "two_parts")


class Memory:
    """The device's memory as torch accounts for it, in bytes."""

    def __init__(self, device: str, module: Any) -> None:
        self._device = device
        self._module = module

    def used(self) -> int:
        return int(self._module.memory_allocated())

    def peak(self) -> int:
        return int(self._module.max_memory_allocated())

    def forget_peak(self) -> None:
        self._module.reset_peak_memory_stats()

    def of(self, *sizes: int) -> int:
        """What tensors of these sizes take: the allocator rounds each up."""
        before = self.used()
        tensors = [torch.empty(nbytes, dtype=torch.uint8, device=self._device) for nbytes in sizes]
        taken = self.used() - before
        del tensors
        return taken


@pytest.fixture
def memory(device: str, device_module: Any) -> Memory:
    # CUDA's libraries take memory of their own for the first product.
    torch.nn.Linear(8, 8, device=device)(torch.ones(8, 8, device=device))
    return Memory(device, device_module)


class MakeTensor(Protocol):
    def __call__(self, kind: str = "plain", shape: tuple[int, ...] = SHAPE) -> torch.Tensor: ...


@pytest.fixture
def make_tensor(device: str) -> MakeTensor:
    """Makes tensors of a kind, each with numbers of its own, and large enough to be moved."""
    torch.manual_seed(0)

    def make(kind: str = "plain", shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
        x = torch.randn(shape).bfloat16().to(device)
        if kind == "mxfp8":
            return MXFP8Quantizer()(x)
        return TwoParts.of(x.float() * 1.001) if kind == "two_parts" else x

    return make


def moving(tensor: torch.Tensor) -> list[int]:
    """Sizes in bytes of those of its parts that are large enough to be moved."""
    return [part.nbytes for part in parts_of(tensor) if part.numel() >= LEAST_ELEMENTS]


def staying(tensor: torch.Tensor) -> list[int]:
    return [part.nbytes for part in parts_of(tensor) if part.numel() < LEAST_ELEMENTS]


@pytest.fixture
def offloading(device: str) -> Callable[..., Any]:
    """get_cpu_offload_context with a small host pool."""

    def make(**options: Any) -> Any:
        return get_cpu_offload_context(enabled=True, device=device, host_bytes=HOST_BYTES, **options)

    return make


@pytest.fixture
def make_state(device_module: Any) -> Callable[..., OffloadableLayerState]:
    """OffloadableLayerState with a small host pool, and a stream of its own unless one is given."""

    def make(stream: torch.Stream | None = None, **options: Any) -> OffloadableLayerState:
        return OffloadableLayerState(stream or device_module.Stream(), host_bytes=HOST_BYTES, **options)

    return make


@pytest.fixture
def state(make_state: Callable[..., OffloadableLayerState]) -> OffloadableLayerState:
    return make_state()

"""Sources of host memory that need torch: its own pinned memory, and its bindings to the runtimes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from ..allocators.acl import AclRegistrar, AclRuntime
from ..allocators.base import DirectMemory, OutOfHostMemory, Region, round_up
from ..allocators.cuda import CudaError, CudaRegistrar
from ..allocators.runtime import RuntimeRegistrar, cannot_pin
from ..sizes import format_bytes


class TorchPinnedMemory(DirectMemory[torch.Tensor]):
    """A `HostMemory` from torch's own pinned allocator, which rounds every request up to a power of two.

    For stacks on which torch does not recognise memory pinned by others. Memory that is given back stays with
    torch, for its next request of that size.
    """

    def footprint(self, nbytes: int) -> int:
        """Return how much torch pins for a region: a power of two."""
        return 1 << max(nbytes - 1, 0).bit_length()

    def _obtain(self, nbytes: int) -> tuple[int, torch.Tensor]:
        tensor = _pinned(nbytes)
        if round_up(tensor.data_ptr()) != tensor.data_ptr():  # torch puts small ones next to each other
            tensor = _pinned(nbytes + round_up(1))
        return round_up(tensor.data_ptr()), tensor

    def _give_back(self, region: Region, held: torch.Tensor) -> None:
        """The memory is free when nothing refers to the tensor any more."""


class NpurtRegistrar(RuntimeRegistrar):
    """A `Registrar` that makes memory known to Ascend's runtime through torch_npu. The runtime's error is AclError.

    npurt: torch.npu.npurt() by default. Raises RuntimeError if torch_npu is not loaded or is too old to have it,
        and OSError if Ascend's runtime is not found.
    """

    def __init__(self, npurt: Any = None) -> None:
        npurt = _npurt() if npurt is None else npurt
        error = AclRuntime().error  # torch_npu says nothing of a failure but its code
        super().__init__(npurt, error, "npuHostRegister", "npuHostUnregister", AclRegistrar.PINNED)


class CudartRegistrar(RuntimeRegistrar):
    """A `Registrar` that makes memory known to the CUDA runtime through torch, which may have it built in.

    The runtime's error is CudaError.

    cudart: torch.cuda.cudart() by default. Raises RuntimeError if torch has no CUDA.
    forget: drops the error that CUDA remembers from a failed call.
    """

    def __init__(self, cudart: Any = None, forget: Callable[[], None] | None = None) -> None:
        self._cudart = _cudart() if cudart is None else cudart
        self._forget = _launch_a_kernel if forget is None else forget
        register, unregister = "cudaHostRegister", "cudaHostUnregister"
        super().__init__(self._cudart, self._failure, register, unregister, CudaRegistrar.PORTABLE)

    def _failure(self, function: str, status: Any, nbytes: int | None = None) -> CudaError:
        self._forget()
        return CudaError(function, int(status), nbytes, self._cudart.cudaGetErrorString(status))


def _pinned(nbytes: int) -> torch.Tensor:
    try:
        tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        raise _not_pinned(nbytes, error) from error
    if tensor.data_ptr() != 0:
        return tensor
    # Where torch_npu cannot pin it says nothing, gives null, and keeps that for the next request of the size.
    runtime = AclRuntime()
    failure = runtime.recall("aclrtMallocHost", nbytes)
    del tensor
    torch.get_device_module().host_empty_cache()
    runtime.recall("aclrtFreeHost", nbytes)  # it has freed null as well
    raise _not_pinned(nbytes, failure)


def _not_pinned(nbytes: int, why: RuntimeError) -> OutOfHostMemory:
    return cannot_pin(f"torch could not pin {format_bytes(nbytes)}: {why}", nbytes)


def _npurt() -> Any:
    module = torch.get_device_module("npu")
    if not hasattr(module, "npurt"):
        raise RuntimeError("this torch_npu has no npurt(); update it, or register by AclRegistrar")
    return module.npurt()


def _cudart() -> Any:
    module: Any = torch.cuda
    if torch.version.cuda is None:
        raise RuntimeError("this torch is built without CUDA")
    return module.cudart()


def _launch_a_kernel() -> None:
    # torch does not bind cudaGetLastError. The check after a launch calls it, and takes what it finds for
    # that launch's own error.
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")

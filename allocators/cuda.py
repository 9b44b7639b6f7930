"""Pinned memory from the CUDA runtime, and the registration there of memory that is not its own."""

from __future__ import annotations

import ctypes
import itertools
import os
from typing import Any, ClassVar

from .runtime import PinnedByRuntime, RuntimeFailure

_LIBRARIES = ("libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0", "libcudart.so")


class CudaPinnedMemory(PinnedByRuntime):
    """A `HostMemory` of memory that is pinned for all devices, one `cudaHostAlloc` for each region.

    Pinning is slow and takes the RAM at once, so put a pool on top. The first request makes the CUDA
    context of the calling thread's device, if there is none. Where CUDA fails for another reason than
    memory, allocate and deallocate raise CudaError.

    library: the name or path of libcudart; None is the one that is loaded already, or else the newest.
        Raises OSError if there is none.
    """

    PORTABLE = 1  # cudaHostAllocPortable

    def __init__(self, library: str | None = None) -> None:
        super().__init__(_CudaRuntime(library), "cudaHostAlloc", "cudaFreeHost", self.PORTABLE)


class CudaRegistrar:
    """A `Registrar` that makes memory known to the CUDA runtime as pinned for all devices.

    `library` is as for `CudaPinnedMemory`. Raises OSError if there is none.
    """

    PORTABLE = 1  # cudaHostRegisterPortable

    def __init__(self, library: str | None = None) -> None:
        self._runtime = _CudaRuntime(library)
        self._register = self._runtime.function("cudaHostRegister", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
        self._unregister = self._runtime.function("cudaHostUnregister", ctypes.c_void_p)

    def register(self, ptr: int, nbytes: int) -> None:
        """Raises OutOfHostMemory, or CudaError where CUDA fails for another reason."""
        code = self._register(ptr, nbytes, self.PORTABLE)
        if code != 0:
            raise self._runtime.error("cudaHostRegister", code, nbytes).or_out_of_memory()

    def unregister(self, ptr: int) -> None:
        """Raises CudaError."""
        code = self._unregister(ptr)
        if code != 0:
            raise self._runtime.error("cudaHostUnregister", code)


class CudaError(RuntimeFailure):
    """A function of the CUDA runtime failed with `code`, for `nbytes` bytes where the size is known."""

    _kind_of_code = "CUDA error"
    _out_of_memory = frozenset({2})  # cudaErrorMemoryAllocation
    _advice = "It may be the error of work that was queued before; CUDA_LAUNCH_BLOCKING=1 tells"


class _CudaRuntime:
    """The functions of libcudart and its errors."""

    failure: ClassVar[type[RuntimeFailure]] = CudaError

    def __init__(self, library: str | None) -> None:
        self._runtime = _load(library)
        self._text = self.function("cudaGetErrorString", ctypes.c_int)
        self._text.restype = ctypes.c_char_p
        self._forget = self.function("cudaGetLastError")

    def function(self, name: str, *arguments: Any) -> Any:
        """A function with arguments of these types that returns a CUDA error. Raises OSError if there is none."""
        function = getattr(self._runtime, name, None)
        if function is None:
            raise OSError(
                f"{self._runtime._name!r} has no function {name}: it is not the CUDA runtime. "
                "Pass the path of libcudart.so, or use PageableMemory"
            )
        function.restype = ctypes.c_int
        function.argtypes = arguments
        return function

    def error(self, function: str, code: int, nbytes: int | None = None) -> CudaError:
        """The error for a function that returned `code` just now, on this thread. CUDA forgets it."""
        # CUDA remembers it, and the check after the next kernel launch would take it for that one's.
        self._forget()
        text: bytes = self._text(code) or b"unknown"
        return CudaError(function, code, nbytes, text.decode(errors="replace"))


def _load(library: str | None) -> ctypes.CDLL:
    names = (library,) if library else _LIBRARIES
    refusals = []
    # First what the process has loaded, which is the one that torch uses.
    for mode, name in itertools.product((os.RTLD_NOLOAD, ctypes.DEFAULT_MODE), names):
        try:
            return ctypes.CDLL(name, mode)
        except OSError as error:
            refusals.append(error)
    raise OSError(
        f"cannot load the CUDA runtime ({', '.join(names)}): {refusals[-1]}. Install CUDA or a torch that "
        "brings it, pass the path of the library, or use PageableMemory"
    ) from refusals[-1]

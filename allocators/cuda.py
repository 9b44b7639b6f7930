"""The CUDA runtime: its pinned memory, and the registration of memory that is not its own."""

from __future__ import annotations

import ctypes
import itertools
import os

from .runtime import PinnedByRuntime, Runtime, RuntimeFailure, RuntimeRegistrar

_LIBRARIES = ("libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0", "libcudart.so")


class CudaPinnedMemory(PinnedByRuntime):
    """A `HostMemory` of memory that is pinned for all devices, one `cudaHostAlloc` for each region.

    Pinning is slow and takes the RAM at once, so put a pool on top. The first request makes the CUDA
    context of the calling thread's device, if there is none. Where CUDA fails for another reason than
    memory, allocate and deallocate raise CudaError.

    Args:
        library: The name or path of libcudart; None is the one that is loaded already, or else the newest.

    Raises:
        OSError: There is none.
    """

    PORTABLE = 1  # cudaHostAllocPortable

    def __init__(self, library: str | None = None) -> None:
        super().__init__(_CudaRuntime(library), "cudaHostAlloc", "cudaFreeHost", self.PORTABLE)


class CudaRegistrar(RuntimeRegistrar):
    """A `Registrar` that makes memory known to the CUDA runtime as pinned for all devices.

    `library` is as for `CudaPinnedMemory`. Raises OSError if there is none. The runtime's error is CudaError.
    """

    PORTABLE = 1  # cudaHostRegisterPortable

    def __init__(self, library: str | None = None) -> None:
        runtime = _CudaRuntime(library)
        runtime.function("cudaHostRegister", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
        runtime.function("cudaHostUnregister", ctypes.c_void_p)
        super().__init__(runtime.library, runtime.error, "cudaHostRegister", "cudaHostUnregister", self.PORTABLE)


class CudaError(RuntimeFailure):
    """A function of the CUDA runtime failed with `code`, for `nbytes` bytes where the size is known."""

    _kind_of_code = "CUDA error"
    _out_of_memory = frozenset({2})  # cudaErrorMemoryAllocation
    _advice = "It may be the error of work that was queued before; CUDA_LAUNCH_BLOCKING=1 tells"


class _CudaRuntime(Runtime):
    failure = CudaError
    _not_the_one = "it is not the CUDA runtime. Pass the path of libcudart.so"

    def __init__(self, library: str | None) -> None:
        super().__init__(_load(library))
        self._text = self.function("cudaGetErrorString", ctypes.c_int, result=ctypes.c_char_p)
        self._forget = self.function("cudaGetLastError")

    def _take_words(self, code: int) -> str:
        # CUDA remembers an error, and the check after the next kernel launch would take it for that one's.
        self._forget()
        text: bytes = self._text(code) or b"unknown"
        return text.decode(errors="replace")


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

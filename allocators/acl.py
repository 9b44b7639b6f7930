"""Pinned memory from Ascend's runtime."""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import Any

from .base import (
    ALIGNMENT,
    OutOfHostMemory,
    Region,
    check_request,
    human,
    not_allocated,
    round_up,
    still_allocated,
)

# ACL_ERROR_BAD_ALLOC, ACL_ERROR_RT_MEMORY_ALLOCATION and ACL_ERROR_RT_DEVICE_OOM; the last is what a
# device without host memory of its own says.
_OUT_OF_MEMORY = frozenset({200000, 207001, 207018})
_THREAD_LEVEL = 0


class AclPinnedMemory:
    """A `HostMemory` of pinned memory, one `aclrtMallocHost` for each region.

    Pinning is slow and takes the RAM at once, so put a `SlabPool` on top. The runtime must have been
    initialised and a device set on the calling thread, as `torch.npu.set_device(...)` does: otherwise
    requests end in an `AclError`. The object must outlive its regions, and does not free them by itself.

    `library` is the name or path of Ascend's runtime; a name also finds a library that is loaded already.
    Raises OSError if there is no such library, or if it lacks a function.
    """

    def __init__(self, library: str = "libascendcl.so") -> None:
        try:
            runtime = ctypes.CDLL(library)
        except OSError as error:
            raise OSError(
                f"cannot load Ascend's runtime {library!r}: {error}. Install CANN and source its set_env.sh, "
                "pass the path of the library, or use PageableMemory"
            ) from error
        self._malloc = _function(
            runtime, "aclrtMallocHost", ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t
        )
        self._free = _function(runtime, "aclrtFreeHost", ctypes.c_int, ctypes.c_void_p)
        self._errors = _LastError(runtime)
        self._live: dict[int, tuple[Region, int]] = {}
        self._used = 0
        self._closed = False
        self._lock = threading.Lock()

    def allocate(self, nbytes: int) -> Region:
        """Pin `nbytes` bytes, on a 4096-byte boundary.

        Raises AclError if the runtime fails for another reason than memory; see `HostMemory.allocate`
        for the other errors.
        """
        check_request(self, nbytes, self._closed)
        raw = self._pin(nbytes)
        if raw % ALIGNMENT:
            # The runtime promises 64-byte boundaries only. Large requests lie on whole pages all the
            # same, so the bytes to spare are asked for only when they turn out to be needed.
            self._unpin(raw, nbytes)
            raw = self._pin(nbytes + ALIGNMENT)
        region = Region(round_up(raw), nbytes)
        with self._lock:
            self._live[region.ptr] = region, raw
            self._used += nbytes
        return region

    def deallocate(self, region: Region) -> None:
        """Unpin and free a region at once, without waiting for the device.

        Raises ValueError if the region is unknown here or was freed already, and AclError if the
        runtime fails; the region then stays allocated.
        """
        with self._lock:
            known, raw = self._live.get(region.ptr, (None, 0))
            if known != region:
                raise not_allocated(self, region)
            self._unpin(raw, region.nbytes)
            del self._live[region.ptr]
            self._used -= region.nbytes

    def footprint(self, nbytes: int) -> int:
        """Return how much memory a region takes: whole pages."""
        return round_up(nbytes)

    def close(self) -> None:
        """Refuse further requests. Raises RuntimeError while regions are still allocated."""
        with self._lock:
            if self._live:
                raise still_allocated(self, [region for region, _ in self._live.values()])
            self._closed = True

    def _pin(self, nbytes: int) -> int:
        if nbytes > sys.maxsize:  # ctypes would cut it down to 64 bits without a word
            raise self._out_of_memory(f"{nbytes} bytes are more than an address can hold", nbytes)
        pointer = ctypes.c_void_p()
        code = self._malloc(ctypes.byref(pointer), nbytes)
        if code != 0:
            detail = self._errors.take(code)
            if code in _OUT_OF_MEMORY:
                raise self._out_of_memory(f"aclrtMallocHost failed with ACL code {code}{detail}", nbytes)
            raise AclError("aclrtMallocHost", code, nbytes, detail)
        if pointer.value is None:
            raise AclError("aclrtMallocHost", code, nbytes, ": it returned a null pointer")
        return pointer.value

    def _unpin(self, raw: int, nbytes: int) -> None:
        code = self._free(raw)
        if code != 0:
            raise AclError("aclrtFreeHost", code, nbytes, self._errors.take(code))

    def _out_of_memory(self, reason: str, nbytes: int) -> OutOfHostMemory:
        return OutOfHostMemory(
            reason,
            "Ask for smaller slabs or lower the host budget, and check the free RAM, ulimit -l and the "
            "container's memory limit; PageableMemory needs no pinning, but copies then block",
            needed=nbytes,
            used=self._used,
        )


class AclError(RuntimeError):
    """A function of Ascend's runtime failed with `code`, for a region of `nbytes` bytes."""

    def __init__(self, function: str, code: int, nbytes: int, detail: str) -> None:
        super().__init__(function, code, nbytes, detail)
        self.function = function
        self.code = code
        self.nbytes = nbytes
        self.detail = detail

    def __str__(self) -> str:
        return (
            f"{self.function} failed with ACL code {self.code} for {human(self.nbytes)} "
            f"({self.nbytes} bytes){self.detail}. Look the code up in acl/error_codes/rt_error_codes.h; "
            "if it says that there is no context, call torch.npu.set_device on this thread first"
        )


class _LastError:
    """What the runtime remembers of the calling thread's last failure. Old runtimes know less of it."""

    def __init__(self, runtime: ctypes.CDLL) -> None:
        self._message = _function_or_none(runtime, "aclGetRecentErrMsg", ctypes.c_char_p)
        self._peek = _function_or_none(runtime, "aclrtPeekAtLastError", ctypes.c_int, ctypes.c_int)
        self._clear = _function_or_none(runtime, "aclrtGetLastError", ctypes.c_int, ctypes.c_int)

    def take(self, code: int) -> str:
        """Forget the failure that returned `code`, and return the runtime's text on it."""
        # torch_npu puts the remembered code in place of that of a later failure, so a refused request
        # that we report ourselves must not stay behind. Any other code is not ours to clear.
        if self._peek and self._clear and self._peek(_THREAD_LEVEL) == code:
            self._clear(_THREAD_LEVEL)
        text: bytes | None = self._message() if self._message else None
        return f": {text.decode(errors='replace').strip()}" if text else ""


def _function(runtime: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
    function = _function_or_none(runtime, name, result, *arguments)
    if function is None:
        raise OSError(
            f"{runtime._name!r} has no function {name}: it is not Ascend's runtime. "
            "Pass the path of libascendcl.so, or use PageableMemory"
        )
    return function


def _function_or_none(runtime: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(runtime, name, None)
    if function is None:
        return None
    function.restype = result
    function.argtypes = arguments
    return function

"""The common part of the devices' runtimes: how they fail, and how they pin memory of their own."""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar, Protocol

from ..sizes import format_bytes
from .base import ALIGNMENT, OutOfHostMemory, Region, round_up
from .direct import DirectMemory


class RuntimeFailure(RuntimeError):
    """A function of a device's runtime failed with `code`, for `nbytes` bytes where the size is known.

    detail: the runtime's own words, "" if there are none.
    """

    # What a subclass says of its runtime: what a code is called, which mean that there is no memory, what to do.
    _kind_of_code: ClassVar[str]
    _out_of_memory: ClassVar[frozenset[int]]
    _advice: ClassVar[str]

    def __init__(self, function: str, code: int, nbytes: int | None, detail: str) -> None:
        # All arguments go to `args`, so that the error can be pickled and keeps its attributes.
        super().__init__(function, code, nbytes, detail)
        self.function = function
        self.code = code
        self.nbytes = nbytes
        self.detail = detail

    def or_out_of_memory(self) -> RuntimeFailure | OutOfHostMemory:
        """The error that a refused request raises: this one, or OutOfHostMemory where the code says so."""
        return cannot_pin(self._what(), self.nbytes or 0) if self.code in self._out_of_memory else self

    def __str__(self) -> str:
        size = "" if self.nbytes is None else f" for {format_bytes(self.nbytes)} ({self.nbytes} bytes)"
        return f"{self._what(size)}. {self._advice}"

    def _what(self, size: str = "") -> str:
        detail = f": {self.detail}" if self.detail else ""
        return f"{self.function} failed with {self._kind_of_code} {self.code}{size}{detail}"


class Runtime(Protocol):
    """The functions of a device's runtime that return a code, which is 0 where they succeed."""

    failure: ClassVar[type[RuntimeFailure]]

    def function(self, name: str, *arguments: Any) -> Any:
        """A function with arguments of these types. Raises OSError if there is none."""
        ...

    def error(self, function: str, code: int, nbytes: int | None = None) -> RuntimeFailure:
        """The error for a function that returned `code` just now, on this thread. The runtime forgets it."""
        ...


class PinnedByRuntime(DirectMemory[int]):
    """A `DirectMemory` of a device's runtime, which pins and frees memory at addresses of its own choice.

    malloc, free: the names of the runtime's functions. `malloc` takes an address for the pointer, the size in
        bytes, and the `flags`; `free` takes the pointer. Raises OSError if there is no such function.
    """

    def __init__(self, runtime: Runtime, malloc: str, free: str, *flags: int) -> None:
        super().__init__()
        self._runtime = runtime
        self._malloc_name, self._free_name = malloc, free
        target = ctypes.POINTER(ctypes.c_void_p)
        self._malloc = runtime.function(malloc, target, ctypes.c_size_t, *(ctypes.c_uint for _ in flags))
        self._free = runtime.function(free, ctypes.c_void_p)
        self._flags = flags

    def _obtain(self, nbytes: int) -> tuple[int, int]:
        raw = self._pin(nbytes)
        if raw % ALIGNMENT:
            # Runtimes promise less than whole pages. Large requests lie on such all the same, so the
            # bytes to spare are asked for only when they turn out to be needed.
            self._unpin(raw, nbytes)
            raw = self._pin(nbytes + ALIGNMENT)
        return round_up(raw), raw

    def _give_back(self, region: Region, held: int) -> None:
        self._unpin(held, region.nbytes)

    def _pin(self, nbytes: int) -> int:
        pointer = ctypes.c_void_p()
        code = self._malloc(ctypes.byref(pointer), nbytes, *self._flags)
        if code != 0:
            raise self._runtime.error(self._malloc_name, code, nbytes).or_out_of_memory()
        if pointer.value is None:
            raise self._runtime.failure(self._malloc_name, code, nbytes, "it returned a null pointer")
        return pointer.value

    def _unpin(self, raw: int, nbytes: int) -> None:
        code = self._free(raw)
        if code != 0:
            raise self._runtime.error(self._free_name, code, nbytes)


def cannot_pin(reason: str, nbytes: int) -> OutOfHostMemory:
    """The error for a runtime that has no memory to pin. The source that raises it to users sets `used`."""
    return OutOfHostMemory(
        reason,
        "Ask for smaller slabs or lower the host budget, and check the free RAM, ulimit -l and the "
        "container's memory limit; PageableMemory needs no pinning, but copies then block",
        needed=nbytes,
        used=0,
    )

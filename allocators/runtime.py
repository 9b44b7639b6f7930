"""The common part of the devices' runtimes: their functions, how they fail, and how they pin memory."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any, ClassVar

from ..sizes import format_bytes
from .base import ALIGNMENT, DirectMemory, OutOfHostMemory, Region, round_up


class Runtime(ABC):
    """A device's runtime by ctypes. Its functions return a code, which is 0 where they succeed."""

    # What a subclass says of its runtime: its errors, and what to do where a library turns out to be another.
    failure: ClassVar[type[RuntimeFailure]]
    _not_the_one: ClassVar[str]

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def function(self, name: str, *arguments: Any, result: Any = ctypes.c_int) -> Any:
        """A function with arguments of these types. Raises OSError if there is none."""
        function = self.optional(name, *arguments, result=result)
        if function is None:
            raise OSError(
                f"{self.library._name!r} has no function {name}: {self._not_the_one}, or use PageableMemory"
            )
        return function

    def optional(self, name: str, *arguments: Any, result: Any = ctypes.c_int) -> Any:
        """A function of these types, or None where this version of the runtime has none of that name."""
        function = getattr(self.library, name, None)
        if function is not None:
            function.restype = result
            function.argtypes = arguments
        return function

    def error(self, function: str, code: int, nbytes: int | None = None) -> RuntimeFailure:
        """The error for a function that returned `code` just now, on this thread. The runtime forgets it."""
        return self.failure(function, code, nbytes, self._take_words(code))

    @abstractmethod
    def _take_words(self, code: int) -> str:
        """What the runtime says of its last error. It forgets the error."""


@dataclass(eq=False, repr=False)
class RuntimeFailure(RuntimeError):
    """A function of a device's runtime failed with `code`, for `nbytes` bytes where the size is known.

    detail: the runtime's own words, "" if there are none.
    """

    # What a subclass says of its runtime: what a code is called, which mean that there is no memory, what to do.
    _kind_of_code: ClassVar[str]
    _out_of_memory: ClassVar[frozenset[int]]
    _advice: ClassVar[str]

    function: str
    code: int
    nbytes: int | None
    detail: str

    def __post_init__(self) -> None:
        super().__init__(*astuple(self))  # pickling and copying make it anew from these

    def or_out_of_memory(self) -> RuntimeFailure | OutOfHostMemory:
        """The error that a refused request raises: this one, or OutOfHostMemory where the code says so."""
        return cannot_pin(self._what(), self.nbytes or 0) if self.code in self._out_of_memory else self

    def __str__(self) -> str:
        size = "" if self.nbytes is None else f" for {format_bytes(self.nbytes)} ({self.nbytes} bytes)"
        return f"{self._what(size)}. {self._advice}"

    def _what(self, size: str = "") -> str:
        detail = f": {self.detail}" if self.detail else ""
        return f"{self.function} failed with {self._kind_of_code} {self.code}{size}{detail}"


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
            self._give_back(Region(raw, nbytes), raw)
            raw = self._pin(nbytes + ALIGNMENT)
        return round_up(raw), raw

    def _give_back(self, region: Region, held: int) -> None:
        code = self._free(held)
        if code != 0:
            raise self._runtime.error(self._free_name, code, region.nbytes)

    def _pin(self, nbytes: int) -> int:
        pointer = ctypes.c_void_p()
        code = self._malloc(ctypes.byref(pointer), nbytes, *self._flags)
        if code != 0:
            raise self._runtime.error(self._malloc_name, code, nbytes).or_out_of_memory()
        if pointer.value is None:
            raise self._runtime.failure(self._malloc_name, code, nbytes, "it returned a null pointer")
        return pointer.value


class RuntimeRegistrar:
    """A `Registrar` of two functions of a runtime, which return a code that is 0 where they succeed.

    library: has the functions, under the names `register` and `unregister`. The first takes an address, a size in
        bytes, and the `flags`; the second takes the address.
    error: makes the error of a function by its name, its code, and the size where it is known.
    """

    def __init__(
        self, library: Any, error: Callable[..., RuntimeFailure], register: str, unregister: str, *flags: Any
    ) -> None:
        self._library = library
        self._error = error
        self._register, self._unregister = register, unregister
        self._flags = flags

    def register(self, ptr: int, nbytes: int) -> None:
        """Raises OutOfHostMemory, or the runtime's error where it fails for another reason."""
        code = getattr(self._library, self._register)(ptr, nbytes, *self._flags)
        if int(code) != 0:
            raise self._error(self._register, code, nbytes).or_out_of_memory()

    def unregister(self, ptr: int) -> None:
        """Raises the runtime's error."""
        code = getattr(self._library, self._unregister)(ptr)
        if int(code) != 0:
            raise self._error(self._unregister, code)


def cannot_pin(reason: str, nbytes: int) -> OutOfHostMemory:
    """The error for a runtime that has no memory to pin. The source that raises it to users sets `used`."""
    return OutOfHostMemory(
        reason,
        "Ask for smaller slabs or lower the host budget, and check the free RAM, ulimit -l and the "
        "container's memory limit; PageableMemory needs no pinning, but copies then block",
        nbytes,
    )

"""The devices' runtimes: their functions, how they fail, and memory that they pin or are told of."""

from __future__ import annotations

import ctypes
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any, ClassVar, Protocol

from ..sizes import format_bytes
from .base import ALIGNMENT, DirectMemory, OutOfHostMemory, Region, round_up
from .pages import PageableMemory, Pages, whole_pages


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


_log = logging.getLogger("tiered_mem.allocators")


class Registrar(Protocol):
    """Makes host memory known to a device's runtime, so that the device copies by itself.

    A range is whole pages, and overlaps no other registered range.
    """

    def register(self, ptr: int, nbytes: int) -> None:
        """Raises OutOfHostMemory or RuntimeError; then nothing is registered."""

    def unregister(self, ptr: int) -> None:
        """Take back the registration that starts at `ptr`. Where it raises RuntimeError the registration stays."""


class RegisteredMemory(PageableMemory):
    """A `HostMemory` of pages that a device's runtime knows as pinned.

    Several threads touch the pages before they are registered. That takes a fraction of the time that runtimes need
    to pin memory of their own. The pages are locked as well, since registration with some drivers locks nothing;
    where the process may not lock them, this is logged once.

    registrar: pins the pages. allocate and deallocate raise what it raises.
    numa_node: see `PageableMemory`.
    chunk_bytes: how much is registered in one piece; drivers refuse hundreds of GiB. A copy should not cross from
        one chunk to the next, so the slabs of a pool on top should be smaller.

    Raises ValueError if `chunk_bytes` is not whole pages.
    """

    def __init__(self, registrar: Registrar, *, numa_node: int | None = None, chunk_bytes: int = 64 << 30) -> None:
        if chunk_bytes <= 0 or chunk_bytes != whole_pages(chunk_bytes):
            raise ValueError(f"chunk_bytes must be whole pages of {whole_pages(1)} bytes, not {chunk_bytes}")
        super().__init__(numa_node)
        self._registrar = registrar
        self._chunk_bytes = chunk_bytes
        self._told_of_lock = False

    def _obtain(self, nbytes: int) -> tuple[int, Pages]:
        ptr, pages = super()._obtain(nbytes)
        end = ptr + pages.nbytes
        try:
            pages.touch()
            self._lock_in_ram(pages)
            for start in range(ptr, end, self._chunk_bytes):
                self._registrar.register(start, min(self._chunk_bytes, end - start))
                pages.registered.append(start)
        except BaseException:
            self._undo(pages)
            raise
        return ptr, pages

    def _give_back(self, region: Region, held: Pages) -> None:
        while held.registered:  # a repeated call goes on where the one before failed
            self._registrar.unregister(held.registered[-1])
            held.registered.pop()
        held.unmap()

    def _undo(self, pages: Pages) -> None:
        region = Region(pages.ptr, pages.nbytes)
        try:
            self._give_back(region, pages)
        except (OSError, RuntimeError) as error:
            # A device may still reach what stayed registered, so nobody else may get these addresses.
            _log.error("%s stay mapped for good, because giving them back failed: %s", region, str(error))

    def _lock_in_ram(self, pages: Pages) -> None:
        try:
            pages.lock()
        except OSError as error:
            if not self._told_of_lock:
                self._told_of_lock = True
                _log.warning(
                    "registered memory is not locked: %s. With an old driver, which does not lock it either, "
                    "the system may swap it out under the device. Raise the limit with ulimit -l, or give the "
                    "process CAP_IPC_LOCK",
                    error.strerror,
                )

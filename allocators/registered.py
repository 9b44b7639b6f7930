"""Memory of our own that a device's runtime is told of."""

from __future__ import annotations

import logging
from typing import Protocol

from .base import Region
from .pages import PageableMemory, Pages, whole_pages

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

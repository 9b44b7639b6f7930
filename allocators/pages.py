"""Memory straight from the operating system: ordinary pages, and pages that stay in RAM."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import resource
from concurrent.futures import ThreadPoolExecutor

from ..sizes import format_bytes
from .base import OutOfHostMemory, Region
from .direct import DirectMemory, Held
from .libc import Libc

HUGE_PAGE = 2 << 20
_MAX_THREADS = 8

_log = logging.getLogger("tiered_mem.allocators")


class Pages:
    """Anonymous private pages from a 2 MiB boundary on. The kernel is asked for huge ones.

    nbytes: rounded up to whole pages of the kernel. The memory is zero, and takes up RAM when it is first written.
    Raises OSError where the kernel has no room.
    """

    def __init__(self, nbytes: int) -> None:
        self._libc = Libc()
        self.nbytes = whole_pages(nbytes)
        # The kernel aligns to its own pages only.
        mapped = self._libc.map(self.nbytes + HUGE_PAGE)
        self.ptr = -(-mapped // HUGE_PAGE) * HUGE_PAGE
        before = self.ptr - mapped
        try:
            self._libc.unmap(self.ptr + self.nbytes, HUGE_PAGE - before)
            if before:
                self._libc.unmap(mapped, before)
        except OSError:
            self._libc.unmap(mapped, self.nbytes + HUGE_PAGE)
            raise
        with contextlib.suppress(OSError):  # not all kernels have them
            self._libc.ask_for_huge_pages(self.ptr, self.nbytes)

    def prefer_node(self, node: int) -> None:
        """Ask for pages of a NUMA node. Call it before any page is touched. Raises OSError."""
        self._libc.prefer_node(self.ptr, self.nbytes, node)

    def touch(self) -> None:
        """Write zeros to all pages, on several threads, for the kernel takes long to find and clear them."""
        threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
        huge_pages = -(-self.nbytes // HUGE_PAGE)
        share = -(-huge_pages // threads) * HUGE_PAGE
        with ThreadPoolExecutor(threads) as pool:
            shares = [pool.submit(self._zero, start, share) for start in range(0, self.nbytes, share)]
        for each in shares:
            each.result()

    def lock(self) -> None:
        """Keep the pages in RAM. Raises OSError that says how much the process may lock."""
        try:
            self._libc.lock(self.ptr, self.nbytes)
        except OSError as error:
            soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            raise OSError(
                error.errno,
                f"cannot lock {format_bytes(self.nbytes)} in RAM ({error.strerror}); RLIMIT_MEMLOCK is "
                f"{_limit(soft)}, at most {_limit(hard)}",
            ) from None

    def unmap(self) -> None:
        """Give the memory back. Where it raises OSError the memory stays."""
        self._libc.unmap(self.ptr, self.nbytes)

    def _zero(self, start: int, share: int) -> None:
        ctypes.memset(self.ptr + start, 0, min(share, self.nbytes - start))


class PageMemory(DirectMemory[Held]):
    """A `DirectMemory` that maps its regions.

    numa_node: where the memory should lie as long as there is room. Where the kernel refuses, as it does in many
    containers, this is logged once. Raises ValueError for a negative node.
    """

    def __init__(self, numa_node: int | None = None) -> None:
        if numa_node is not None and numa_node < 0:
            raise ValueError(f"there is no NUMA node {numa_node}; None leaves the choice to the kernel")
        super().__init__()
        self._numa_node = numa_node
        self._told_of_node = False

    def footprint(self, nbytes: int) -> int:
        """Return how much memory a region takes: whole pages of the kernel."""
        return whole_pages(nbytes)

    def _map(self, nbytes: int) -> Pages:
        try:
            pages = Pages(nbytes)
        except OSError as error:
            raise OutOfHostMemory(
                f"the operating system refused to map memory: {error}",
                "Ask for less, or check the limits of this process: ulimit -v, the overcommit settings, "
                "and vm.max_map_count where there are very many regions",
                needed=nbytes,
                used=0,
            ) from error
        if self._numa_node is not None:
            self._place(pages, self._numa_node)
        return pages

    def _place(self, pages: Pages, node: int) -> None:
        try:
            pages.prefer_node(node)
        except OSError as error:
            if not self._told_of_node:
                self._told_of_node = True
                _log.warning(
                    "memory is not placed on NUMA node %d: %s. Copies may be slower; start the process with "
                    "numactl --preferred=%d, or in a container that may call mbind",
                    *(node, str(error), node),
                )


class PageableMemory(PageMemory[Pages]):
    """A `HostMemory` of ordinary pages. See `PageMemory` for `numa_node`.

    The memory is not pinned, so that devices copy to and from it synchronously. It is zeroed, and takes up RAM when
    it is first written.
    """

    def _obtain(self, nbytes: int) -> tuple[int, Pages]:
        pages = self._map(nbytes)
        return pages.ptr, pages

    def _give_back(self, region: Region, held: Pages) -> None:
        held.unmap()


class LockedMemory(PageableMemory):
    """A `HostMemory` of pages that are in RAM from the start, and stay there.

    Devices do not know that, so copies are those of pageable memory without the page faults. The process must be
    allowed to lock as much; otherwise a request raises OutOfHostMemory.
    """

    def _obtain(self, nbytes: int) -> tuple[int, Pages]:
        pages = self._map(nbytes)
        try:
            pages.touch()
            pages.lock()
        except OSError as error:
            pages.unmap()
            soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            raise OutOfHostMemory(
                str(error.strerror),
                "Raise it with ulimit -l, for a container with --ulimit memlock=-1, or give the process "
                "CAP_IPC_LOCK; PageableMemory locks nothing",
                needed=nbytes,
                used=0,
                limit=None if soft == resource.RLIM_INFINITY else soft,
            ) from error
        except BaseException:
            pages.unmap()
            raise
        return pages.ptr, pages


def whole_pages(nbytes: int) -> int:
    """Round a size up to whole pages of the kernel."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _limit(nbytes: int) -> str:
    return "unlimited" if nbytes == resource.RLIM_INFINITY else f"{nbytes} bytes"

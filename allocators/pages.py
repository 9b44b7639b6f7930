"""Memory straight from the operating system: ordinary pages, and pages that stay in RAM."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
import re
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..sizes import format_bytes
from .base import DirectMemory, OutOfHostMemory, Region

_HUGE_PAGE = 2 << 20
_MAX_THREADS = 8
# The C library has no mbind, so it is called by its number.
_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_PREFERRED = 1
_MADV_HUGEPAGE = 14
_WORD_BITS = 64

_log = logging.getLogger("tiered_mem.allocators")


class PageableMemory(DirectMemory["Pages"]):
    """A `HostMemory` of ordinary pages.

    The memory is not pinned, so that devices copy to and from it synchronously. It is zeroed, and takes up RAM when
    it is first written.

    Args:
        numa_node: Where the memory should lie as long as there is room. Where the kernel refuses, as it does in
            many containers, this is logged once.

    Raises:
        ValueError: The node is negative.
    """

    def __init__(self, numa_node: int | None = None) -> None:
        if numa_node is not None and numa_node < 0:
            raise ValueError(f"there is no NUMA node {numa_node}; None leaves the choice to the kernel")
        super().__init__()
        self._numa_node = numa_node
        self._told_of_node = False

    def footprint(self, nbytes: int) -> int:
        """Return how much memory a region takes: whole pages of the kernel.

        Args:
            nbytes: Its size.
        """
        return whole_pages(nbytes)

    def _obtain(self, nbytes: int) -> tuple[int, Pages]:
        try:
            pages = Pages(nbytes)
        except OSError as error:
            raise OutOfHostMemory(
                f"the operating system refused to map memory: {error}",
                "Ask for less, or check the limits of this process: ulimit -v, the overcommit settings, "
                "and vm.max_map_count where there are very many regions",
                nbytes,
            ) from error
        if self._numa_node is not None:
            self._place(pages, self._numa_node)
        return pages.ptr, pages

    def _give_back(self, region: Region, held: Pages) -> None:
        held.unmap()

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


class LockedMemory(PageableMemory):
    """A `HostMemory` of pages that are in RAM from the start, and stay there.

    Devices do not know that, so copies are those of pageable memory without the page faults. The process must be
    allowed to lock as much; otherwise a request raises OutOfHostMemory.

    Args:
        numa_node: As for PageableMemory.
    """

    def _obtain(self, nbytes: int) -> tuple[int, Pages]:
        ptr, pages = super()._obtain(nbytes)
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
                nbytes,
                limit=None if soft == resource.RLIM_INFINITY else soft,
            ) from error
        except BaseException:
            pages.unmap()
            raise
        return ptr, pages


class Pages:
    """Anonymous private pages from a 2 MiB boundary on. The kernel is asked for huge ones.

    nbytes: rounded up to whole pages of the kernel. The memory is zero, and takes up RAM when it is first written.
    Raises OSError where the kernel has no room.

    registered: the starts of the parts that a device's runtime knows.
    """

    def __init__(self, nbytes: int) -> None:
        self._libc = _libc()
        self.registered: list[int] = []
        self.nbytes = whole_pages(nbytes)
        # The kernel aligns to its own pages only.
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        mapped = _checked("mmap", self._libc.mmap(None, self.nbytes + _HUGE_PAGE, protection, flags, -1, 0))
        self.ptr = -(-mapped // _HUGE_PAGE) * _HUGE_PAGE
        before = self.ptr - mapped
        try:
            self._unmap(self.ptr + self.nbytes, _HUGE_PAGE - before)
            if before:
                self._unmap(mapped, before)
        except OSError:
            self._unmap(mapped, self.nbytes + _HUGE_PAGE)
            raise
        self._libc.madvise(self.ptr, self.nbytes, _MADV_HUGEPAGE)  # not all kernels have them

    def prefer_node(self, node: int) -> None:
        """Ask for pages of a NUMA node while it has any. Call it before any page is touched. Raises OSError."""
        number = _MBIND.get(platform.machine())
        if number is None:
            raise OSError(f"the number of the system call mbind is not known on {platform.machine()}")
        words = node // _WORD_BITS + 1
        mask = (ctypes.c_uint64 * words)()
        mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
        long, most = ctypes.c_long, ctypes.c_ulong(words * _WORD_BITS + 1)  # the kernel takes one bit less
        memory = ctypes.c_void_p(self.ptr), ctypes.c_size_t(self.nbytes)
        policy = long(_MPOL_PREFERRED), ctypes.byref(mask), most
        _checked("mbind", self._libc.syscall(long(number), *memory, *policy, long(0)))

    def touch(self) -> None:
        """Write zeros to all pages, on several threads, for the kernel takes long to find and clear them."""
        threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
        huge_pages = -(-self.nbytes // _HUGE_PAGE)
        share = -(-huge_pages // threads) * _HUGE_PAGE
        with ThreadPoolExecutor(threads) as pool:
            shares = [pool.submit(self._zero, start, share) for start in range(0, self.nbytes, share)]
        for each in shares:
            each.result()

    def lock(self) -> None:
        """Keep the pages in RAM until they are unmapped. Raises OSError that says how much the process may lock."""
        try:
            _checked("mlock", self._libc.mlock(self.ptr, self.nbytes))
        except OSError as error:
            soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            raise OSError(
                error.errno,
                f"cannot lock {format_bytes(self.nbytes)} in RAM ({error.strerror}); RLIMIT_MEMLOCK is "
                f"{_limit(soft)}, at most {_limit(hard)}",
            ) from None

    def unmap(self) -> None:
        """Give the memory back. Where it raises OSError the memory stays."""
        self._unmap(self.ptr, self.nbytes)

    def _unmap(self, ptr: int, nbytes: int) -> None:
        _checked("munmap", self._libc.munmap(ptr, nbytes))

    def _zero(self, start: int, share: int) -> None:
        ctypes.memset(self.ptr + start, 0, min(share, self.nbytes - start))


def whole_pages(nbytes: int) -> int:
    """Round a size up to whole pages of the kernel."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def node_of_pci(bus_id: str, root: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """Return the NUMA node that a PCI device is attached to; None where the system does not know.

    bus_id: such as "0000:3d:00.0". Raises ValueError for any other text.
    """
    match = re.fullmatch(r"([0-9a-f]{1,8}):([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-7])", bus_id.lower())
    if match is None:
        raise ValueError(f"{bus_id!r} is not a PCI address such as '0000:3d:00.0'")
    domain, bus, device, function = (int(part, 16) for part in match.groups())
    entry = root / f"{domain:04x}:{bus:02x}:{device:02x}.{function}" / "numa_node"
    try:
        node = int(entry.read_text())
    except (OSError, ValueError):
        return None
    return None if node < 0 else node


def _limit(nbytes: int) -> str:
    return "unlimited" if nbytes == resource.RLIM_INFINITY else f"{nbytes} bytes"


def _libc() -> ctypes.CDLL:
    """The calls on memory that Python does not offer. Each returns -1 where it is refused."""
    libc = ctypes.CDLL(None, use_errno=True)
    range_of_bytes, number, long = (ctypes.c_void_p, ctypes.c_size_t), ctypes.c_int, ctypes.c_long
    libc.mmap.argtypes = (*range_of_bytes, number, number, number, long)
    libc.mmap.restype = ctypes.c_ssize_t
    libc.munmap.argtypes = libc.mlock.argtypes = range_of_bytes
    libc.madvise.argtypes = (*range_of_bytes, number)
    libc.syscall.restype = long
    return libc


def _checked(function: str, result: int) -> int:
    """What a function of the C library returned just now, on this thread. Raises OSError where it was refused."""
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{function}: {os.strerror(code)}")
    return result

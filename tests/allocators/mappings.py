"""What the kernel says of this process's memory."""

from __future__ import annotations

import ctypes
import errno
import mmap
from collections.abc import Sequence
from pathlib import Path

import pytest


def is_mapped(ptr: int) -> bool:
    """Whether an address is mapped. It asks for one page, as a list of mappings takes memory, and may take this."""
    return _pages(ptr - ptr % mmap.PAGESIZE, mmap.PAGESIZE) is not None


def mapped_bytes() -> int:
    """The size of all mappings that may be written to."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ends = [mapping.split("-") for mapping, rights, *_ in lines if rights[1] == "w"]
    return sum(int(end, 16) - int(start, 16) for start, end in ends)


def resident_pages(ptr: int, nbytes: int) -> list[bool]:
    """Whether each page of a range is in RAM."""
    pages = _pages(ptr, nbytes)
    assert pages is not None, "it is mapped"
    return [bool(page & 1) for page in pages]


def _pages(ptr: int, nbytes: int) -> Sequence[int] | None:
    """What mincore says of each page; None where one of them is not mapped."""
    pages = (ctypes.c_ubyte * -(-nbytes // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(ptr), ctypes.c_size_t(nbytes), pages) == 0:
        return pages
    assert ctypes.get_errno() == errno.ENOMEM, ctypes.get_errno()
    return None


def flags_of(ptr: int) -> set[str]:
    """The kernel's flags for the mapping that an address lies in, such as "hg" where huge pages are asked for."""
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *words = line.split()
        if not name.endswith(":"):
            start, end = (int(each, 16) for each in name.split("-"))
            here = start <= ptr < end
        elif here and name == "VmFlags:":
            return set(words)
    pytest.skip("this kernel tells no flags of mappings")


def node_policy_of(ptr: int) -> str:
    """The NUMA policy of the mapping that starts at an address, such as "prefer:0"."""
    numa_maps = Path("/proc/self/numa_maps")
    if not numa_maps.exists():
        pytest.skip("this kernel knows nothing of NUMA")
    for line in numa_maps.read_text().splitlines():
        start, policy = line.split()[:2]
        if int(start, 16) == ptr:
            return policy
    raise AssertionError(f"nothing is mapped from {ptr:#x} on")


def locked_bytes() -> int:
    """How much of this process's memory is locked in RAM."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmLck:"):
            return int(line.split()[1]) << 10
    pytest.skip("this kernel does not tell how much is locked")


def needs_locked(nbytes: int) -> None:
    """Skips the test where this process may not lock so much."""
    libc = ctypes.CDLL(None)
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapping:
        first = ctypes.c_char.from_buffer(mapping)
        refused = libc.mlock(ctypes.byref(first), ctypes.c_size_t(nbytes))
        del first
    if refused:
        pytest.skip(f"this process may not lock {nbytes >> 20} MiB in RAM: see ulimit -l")

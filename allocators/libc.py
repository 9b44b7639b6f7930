"""System calls on memory that Python does not offer."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform

# The C library has no mbind, so it is called by its number.
_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_PREFERRED = 1
_MADV_HUGEPAGE = 14
_WORD_BITS = 64


class Libc:
    """Calls on ranges of memory: an address and a size in bytes. Each raises OSError where it is refused."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self._mmap = libc.mmap
        self._mmap.argtypes = (address, size, number, number, number, ctypes.c_long)
        self._mmap.restype = ctypes.c_ssize_t
        self._munmap, self._mlock, self._madvise = libc.munmap, libc.mlock, libc.madvise
        self._munmap.argtypes = self._mlock.argtypes = (address, size)
        self._madvise.argtypes = (address, size, number)
        self._syscall = libc.syscall
        self._syscall.restype = ctypes.c_long

    def map(self, nbytes: int) -> int:
        """Return the address of new anonymous private memory. It is zero."""
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        ptr: int = self._mmap(None, nbytes, protection, flags, -1, 0)
        if ptr == -1:
            raise _refused("mmap")
        return ptr

    def unmap(self, ptr: int, nbytes: int) -> None:
        """Unmap whole pages. They may be a part of what was mapped."""
        if self._munmap(ptr, nbytes) != 0:
            raise _refused("munmap")

    def lock(self, ptr: int, nbytes: int) -> None:
        """Keep a range in RAM, until it is unmapped."""
        if self._mlock(ptr, nbytes) != 0:
            raise _refused("mlock")

    def ask_for_huge_pages(self, ptr: int, nbytes: int) -> None:
        if self._madvise(ptr, nbytes, _MADV_HUGEPAGE) != 0:
            raise _refused("madvise")

    def prefer_node(self, ptr: int, nbytes: int, node: int) -> None:
        """Take pages that are touched later from a NUMA node, as long as it has any."""
        number = _MBIND.get(platform.machine())
        if number is None:
            raise OSError(f"the number of the system call mbind is not known on {platform.machine()}")
        words = node // _WORD_BITS + 1
        mask = (ctypes.c_uint64 * words)()
        mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
        long, most = ctypes.c_long, ctypes.c_ulong(words * _WORD_BITS + 1)  # the kernel takes one bit less
        if self._syscall(
            *(long(number), ctypes.c_void_p(ptr), ctypes.c_size_t(nbytes), long(_MPOL_PREFERRED)),
            *(ctypes.byref(mask), most, long(0)),
        ):
            raise _refused("mbind")


def _refused(function: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{function}: {os.strerror(code)}")

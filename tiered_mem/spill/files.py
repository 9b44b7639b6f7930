"""The operating system's calls on spill files."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Iterator
from typing import Protocol

from .folder import SpillFolder

# One type for every size: ctypes would make one for each, and they are garbage that only the collector frees.
_ANY_BYTES = ctypes.c_char * sys.maxsize
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL)


class Files(Protocol):
    """The disk tier's calls on files. Each raises OSError, and blocks without holding the GIL.

    `ptr` is an address, `nbytes` and `offset` are bytes; with direct I/O all three are multiples of 4096.
    """

    def create(self, folder: SpillFolder, name: str, direct: bool) -> int:
        """Make a file, which must not exist yet, and return a descriptor for reading and writing."""
        ...

    def open(self, folder: SpillFolder, name: str, direct: bool, *, write: bool) -> int:
        """Return a descriptor of an existing file for reading, and for writing where `write` is True."""
        ...

    def pread(self, fd: int, ptr: int, nbytes: int, offset: int) -> int:
        """Read into memory; return how many bytes came, which may be fewer."""
        ...

    def pwrite(self, fd: int, ptr: int, nbytes: int, offset: int) -> int:
        """Write from memory; return how many bytes went, which may be fewer."""
        ...

    def allocate(self, fd: int, nbytes: int) -> None:
        """Make a file longer, with room on the drive. A failed call may keep a part of the room."""
        ...

    def truncate(self, fd: int, nbytes: int) -> None: ...

    def stat(self, fd: int) -> os.stat_result: ...

    def sync(self, fd: int) -> None:
        """Wait until all writes are on the drive. Raises the errors of earlier, buffered writes too."""
        ...

    def advise_dropped(self, fd: int) -> None:
        """Tell the page cache that nobody will read the file soon."""
        ...

    def close(self, fd: int) -> None:
        """Close the descriptor. It is closed even where this raises."""
        ...

    def remove(self, folder: SpillFolder, name: str) -> None: ...


class OsFiles:
    """`Files` of the system that Python runs on."""

    def create(self, folder: SpillFolder, name: str, direct: bool) -> int:
        return folder.create(name, os.O_DIRECT if direct else 0)

    def open(self, folder: SpillFolder, name: str, direct: bool, *, write: bool) -> int:
        flags = os.O_DIRECT if direct else 0
        try:
            return folder.open(name, flags)
        except OSError as error:
            # The kernel makes many a file system read-only after an error on the drive: what is there can be read.
            if write or error.errno != errno.EROFS:
                raise
            return os.open(folder.path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags)

    def pread(self, fd: int, ptr: int, nbytes: int, offset: int) -> int:
        return os.preadv(fd, [memory_at(ptr, nbytes)], offset)

    def pwrite(self, fd: int, ptr: int, nbytes: int, offset: int) -> int:
        return os.pwritev(fd, [memory_at(ptr, nbytes)], offset)

    def allocate(self, fd: int, nbytes: int) -> None:
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            # The C library's substitute, which writes single bytes, fails with direct I/O.
            if error.errno not in _NO_FALLOCATE:
                raise
            os.ftruncate(fd, nbytes)

    def truncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def stat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def advise_dropped(self, fd: int) -> None:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self, fd: int) -> None:
        os.close(fd)

    def remove(self, folder: SpillFolder, name: str) -> None:
        folder.remove(name)


def memory_at(ptr: int, nbytes: int) -> memoryview:
    """The bytes at an address, which must stay valid for as long as they are used. Nothing is copied."""
    return memoryview(_ANY_BYTES.from_address(ptr)).cast("B")[:nbytes]


@contextlib.contextmanager
def pages(nbytes: int) -> Iterator[int]:
    """The address of new memory, on a page boundary, that is zero."""
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapped:
        yield ctypes.addressof(ctypes.c_char.from_buffer(mapped))

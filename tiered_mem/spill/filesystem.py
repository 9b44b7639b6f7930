"""What the operating system does with files, and what it tells of file systems."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs", "rootfs"}
_NETWORK = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "9p", "virtiofs", "ceph", "lustre", "gpfs", "beegfs"),
    *("glusterfs", "pvfs2", "orangefs", "panfs", "wekafs", "dpc", "gfs2", "ocfs2", "fuse"),
}

_AT_FDCWD = -100
_STATX_DIOALIGN = 0x2000
# struct statx of linux/stat.h: its size, and where three 32-bit numbers lie in it.
_STATX_BYTES, _MASK, _DIO_MEM_ALIGN, _DIO_OFFSET_ALIGN = 256, 0, 152, 156
# Kernels from before the call, and containers whose rules are from before it.
_NO_STATX = {errno.ENOSYS, errno.EPERM}
# One type for every size: ctypes would make one for each, and they are garbage that only the collector frees.
_ANY_BYTES = ctypes.c_char * sys.maxsize
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL)


class Files:
    """The disk tier's calls on files. Each raises OSError, and blocks without holding the GIL.

    `ptr` is an address, `nbytes` and `offset` are bytes; with direct I/O all three are multiples of 4096.
    """

    def open(self, name: str, flags: int, folder: int) -> int:
        """Open a file of a folder, which is open as `folder`. A file that is made is for this user alone."""
        return os.open(name, flags, 0o600, dir_fd=folder)

    def remove(self, name: str, folder: int) -> None:
        os.unlink(name, dir_fd=folder)

    def pread(self, fd: int, ptr: int, nbytes: int, offset: int) -> int:
        """Read into memory; return how many bytes came, which may be fewer."""
        return os.preadv(fd, [memory_at(ptr, nbytes)], offset)

    def pwrite(self, fd: int, ptr: int, nbytes: int, offset: int) -> int:
        """Write from memory; return how many bytes went, which may be fewer."""
        return os.pwritev(fd, [memory_at(ptr, nbytes)], offset)

    def contents(self, ptr: int, nbytes: int) -> memoryview:
        """What was read, or is to be written: checksums are taken of it."""
        return memory_at(ptr, nbytes)

    def allocate(self, fd: int, nbytes: int) -> None:
        """Make a file longer, with room on the drive. A failed call may keep a part of the room."""
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
        """Wait until all writes are on the drive. Raises the errors of earlier, buffered writes too."""
        os.fdatasync(fd)

    def advise_dropped(self, fd: int) -> None:
        """Tell the page cache that nobody will read the file soon."""
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def free_bytes(self, folder: int) -> int:
        """The bytes that the file system of an open folder has left for this user. Quotas may leave less."""
        found = os.fstatvfs(folder)
        return found.f_bavail * found.f_frsize

    def close(self, fd: int) -> None:
        """Close the descriptor. It is closed even where this raises."""
        os.close(fd)


def memory_at(ptr: int, nbytes: int) -> memoryview:
    """The bytes at an address, which must stay valid for as long as they are used. Nothing is copied."""
    return memoryview(_ANY_BYTES.from_address(ptr)).cast("B")[:nbytes]


@contextlib.contextmanager
def pages(nbytes: int) -> Iterator[int]:
    """The address of new memory, on a page boundary, that is zero."""
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapped:
        yield ctypes.addressof(ctypes.c_char.from_buffer(mapped))


@dataclass(frozen=True, slots=True)
class FileSystem:
    """name: the kernel's name, such as "ext4", "nfs4" or "fuse.sshfs"; "unknown" where it does not tell."""

    name: str

    @property
    def in_memory(self) -> bool:
        """Whether its files lie in the host's memory."""
        return self.name in _IN_MEMORY

    @property
    def network(self) -> bool:
        """Whether other machines may use it too. File systems in user space count as such."""
        return self.name in _NETWORK or self.name.startswith("fuse.")


def filesystem_of(path: str | os.PathLike[str] | int, proc: Path = Path("/proc/self")) -> FileSystem:
    """The file system that a path, or an open file, lies on. Raises OSError where there is no such file.

    proc: the kernel's folder about this process.
    """
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC) if not isinstance(path, int) else path
    try:
        fields = [line.split() for line in _lines(proc / "fdinfo" / str(fd))]
    finally:
        if fd != path:
            os.close(fd)
    mount = next((words[1] for words in fields if words[0] == "mnt_id:"), None)
    # Such as: 36 35 98:0 /root /mnt rw,noatime master:1 - ext4 /dev/sda rw
    for line in _lines(proc / "mountinfo"):
        before, _, after = line.partition(" - ")
        if before.split()[0] == mount:
            return FileSystem(after.split()[0])
    return FileSystem("unknown")


def direct_io_alignment(path: str | os.PathLike[str]) -> int | None:
    """The bytes that addresses, offsets and sizes of direct I/O on a file must be multiples of.

    0 where the file takes no direct I/O; None where the kernel (before Linux 6.1) or the file system does not tell.
    Raises OSError where there is no such file.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "statx"):
        return None
    found = ctypes.create_string_buffer(_STATX_BYTES)
    if libc.statx(_AT_FDCWD, os.fsencode(path), 0, ctypes.c_uint(_STATX_DIOALIGN), found) != 0:
        code = ctypes.get_errno()
        if code in _NO_STATX:
            return None
        raise OSError(code, os.strerror(code), os.fspath(path))
    mask, memory, offset = (
        ctypes.c_uint32.from_buffer(found, at).value for at in (_MASK, _DIO_MEM_ALIGN, _DIO_OFFSET_ALIGN)
    )
    return max(memory, offset) if mask & _STATX_DIOALIGN else None


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []

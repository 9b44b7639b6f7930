"""The kind of a file system, and its alignment for direct I/O."""

from __future__ import annotations

import ctypes
import errno
import os
from dataclasses import dataclass
from pathlib import Path

UNKNOWN = "unknown"
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
    return FileSystem(UNKNOWN)


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

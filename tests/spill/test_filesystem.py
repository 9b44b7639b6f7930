from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

import psutil
import pytest

from tiered_mem.spill.filesystem import FileSystem, direct_io_alignment, filesystem_of

SHM = Path("/dev/shm")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_path_lies_on_the_file_system_of_its_mount(tmp_path: Path) -> None:
    mounts = {mount.mountpoint: mount.fstype for mount in psutil.disk_partitions(all=True)}
    nearest = max((point for point in mounts if tmp_path.is_relative_to(point)), key=len)
    assert filesystem_of(tmp_path).name == mounts[nearest]


def test_an_open_file_is_asked_by_its_number(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        assert filesystem_of(file.fileno()) == filesystem_of(tmp_path)
        file.write("it is still open")


def test_no_file_stays_open(tmp_path: Path) -> None:
    before = open_files()
    filesystem_of(tmp_path)
    with pytest.raises(FileNotFoundError):
        filesystem_of(tmp_path / "missing")
    assert open_files() == before


@pytest.mark.skipif(not SHM.is_mount(), reason="there is no /dev/shm")
def test_shared_memory_is_memory() -> None:
    assert filesystem_of(SHM) == FileSystem("tmpfs")
    assert FileSystem("tmpfs").in_memory


MOUNTS = """\
12 1 0:40 / /far rw - fuse.sshfs host: rw
112 1 0:41 / /with\\040space rw,noatime master:1 propagate_from:2 - nfs4 server:/a rw
1 0 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
"""


@pytest.mark.parametrize(("mount", "name"), [(1, "ext4"), (12, "fuse.sshfs"), (112, "nfs4"), (2, "unknown")])
def test_the_mount_is_found_by_its_number(tmp_path: Path, mount: int, name: str) -> None:
    (tmp_path / "fdinfo").mkdir()
    (tmp_path / "fdinfo" / "7").write_text(f"pos:\t0\nflags:\t0100000\nmnt_id:\t{mount}\nino:\t12\n")
    (tmp_path / "mountinfo").write_text(MOUNTS)
    assert filesystem_of(7, proc=tmp_path).name == name


def test_a_kernel_that_tells_nothing_leaves_it_unknown(tmp_path: Path) -> None:
    found = filesystem_of(tmp_path, proc=tmp_path)
    assert (found.name, found.in_memory, found.network) == ("unknown", False, False)


@pytest.mark.parametrize(
    ("name", "in_memory", "network"),
    [
        ("ext4", False, False),
        ("xfs", False, False),
        ("overlay", False, False),
        ("fuseblk", False, False),
        ("tmpfs", True, False),
        ("ramfs", True, False),
        ("nfs", False, True),
        ("lustre", False, True),
        ("fuse", False, True),
        ("fuse.juicefs", False, True),
    ],
)
def test_memory_and_networks_are_told_from_drives(name: str, in_memory: bool, network: bool) -> None:
    assert (FileSystem(name).in_memory, FileSystem(name).network) == (in_memory, network)


def test_a_write_of_the_alignment_that_the_kernel_names_works(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"")
    alignment = direct_io_alignment(path)
    if not alignment:
        pytest.skip(f"nothing is told of direct I/O on {filesystem_of(tmp_path).name}")
    assert 4096 % alignment == 0
    fd = os.open(path, os.O_WRONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, alignment) as memory:
            assert os.pwrite(fd, memory, alignment) == alignment
    finally:
        os.close(fd)


def test_direct_io_on_a_file_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        direct_io_alignment(tmp_path / "missing")


class NoCall:
    """A C library from before the call."""


class RefusedCall:
    """A C library with the call, which the kernel refuses."""

    def __init__(self, code: int) -> None:
        self.code = code

    def statx(self, *_: object) -> int:
        ctypes.set_errno(self.code)
        return -1


@pytest.mark.parametrize("libc", [NoCall(), RefusedCall(errno.ENOSYS), RefusedCall(errno.EPERM)])
def test_without_the_call_nothing_is_known_of_direct_io(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, libc: object
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: libc)
    assert direct_io_alignment(tmp_path) is None

from __future__ import annotations

import errno
import logging
import mmap
import os
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.spill.disks import BLOCK, MIB, disk_in, io_threads, open_in
from tests.spill.faulty_files import NOTHING, FaultyFiles
from tests.spill.memory import Memory, empty, noise
from tiered_mem.errors import SpillDirRefused
from tiered_mem.spill.disk_tier import SMALLEST_RECORD, DiskTier
from tiered_mem.spill.filesystem import Files
from tiered_mem.spill.folder import SpillFolder
from tiered_mem.spill.lower_tier import Piece
from tiered_mem.spill.reader import read_record
from tiered_mem.spill.record_io import REQUEST_BYTES

SIZES = (1, 4095, 4096, 4097, 100_000, 0, 3 * MIB + 5)


# What goes in and comes out


@pytest.mark.parametrize("checksum", [None, "xxh3_64", "crc32", "none"])
@pytest.mark.parametrize("takes_direct", [True, False])
def test_what_was_written_is_read(tmp_path: Path, checksum: str | None, takes_direct: bool) -> None:
    contents = [noise(nbytes, seed) for seed, nbytes in enumerate(SIZES)]
    files = FaultyFiles(takes_direct=takes_direct)
    with disk_in(tmp_path, files=files, checksum=checksum) as disk:
        records = [disk.put(content) for content in contents]
        together = disk.put(*contents)
        assert [disk.get(record) for record in records] == [[content] for content in contents]
        assert disk.get(together) == contents
        for record in (*records, together):
            disk.tier.release(record)
        again = disk.put(*reversed(contents))
        assert disk.get(again) == contents[::-1]
        assert disk.tier.stats().failures == 0
        assert disk.tier.stats().direct <= takes_direct


def test_records_larger_than_a_request_come_back(tmp_path: Path) -> None:
    content = noise(2 * REQUEST_BYTES + MIB + 1)
    with disk_in(tmp_path, capacity=32 * MIB) as disk:
        record = disk.put(content)
        lengths = [call.nbytes for call in disk.files.named("pwrite")]
        assert max(lengths) == REQUEST_BYTES
        assert disk.get(record) == [content]


def test_some_pieces_can_be_read_in_any_order(tmp_path: Path) -> None:
    contents = [noise(nbytes, nbytes) for nbytes in (5000, 100, 9000, 4096)]
    with disk_in(tmp_path) as disk:
        record = disk.put(*contents)
        third, first = empty(9000), empty(5000)
        job = disk.tier.read(record, [(2, third.ptr), (0, first.ptr)])
        job.wait()
        assert job.error is None
        assert [third.content, first.content] == [contents[2], contents[0]]
        nothing = disk.tier.read(record, [])
        nothing.wait()
        assert nothing.error is None


def test_neighbours_in_memory_need_not_be_neighbours_in_the_file(tmp_path: Path) -> None:
    contents = [noise(2 * BLOCK, seed) for seed in range(3)]
    with disk_in(tmp_path) as disk:
        record = disk.put(*contents)
        memory = empty(4 * BLOCK)
        job = disk.tier.read(record, [(0, memory.ptr), (2, memory.ptr + 2 * BLOCK)])
        job.wait()
        assert job.error is None
        assert memory.content == contents[0] + contents[2]


def test_neighbours_in_memory_go_and_come_in_one_request(tmp_path: Path) -> None:
    memory = Memory(noise(5 * BLOCK))
    far = Memory(noise(BLOCK, 1))
    pieces = [
        Piece("a", memory.ptr, 2 * BLOCK, "float32"),
        Piece("b", memory.ptr + 2 * BLOCK, 100, "uint8"),
        Piece("c", memory.ptr + 3 * BLOCK, 2 * BLOCK, "bfloat16"),
        Piece("d", far.ptr, BLOCK, "uint8"),
    ]
    with disk_in(tmp_path) as disk:
        disk.files.calls.clear()
        record = disk.tier.write(pieces, step=1, kind="activation")
        record.job.wait()
        data, _header = [call for call in disk.files.named("pwrite") if call.offset != BLOCK * 6][:2]
        assert (data.offset, data.nbytes) == (BLOCK, 5 * BLOCK)
        disk.files.calls.clear()
        back = empty(5 * BLOCK)
        job = disk.tier.read(record, [(0, back.ptr), (1, back.ptr + 2 * BLOCK), (2, back.ptr + 3 * BLOCK)])
        job.wait()
        assert [(call.offset, call.nbytes) for call in disk.files.named("pread")] == [
            (0, BLOCK),
            (BLOCK, 5 * BLOCK),
        ]
        assert back.content == memory.content


def test_a_file_is_one_that_others_can_read(tmp_path: Path) -> None:
    content = noise(4000)
    with disk_in(tmp_path) as disk:
        memory = Memory(content)
        record = disk.tier.write([memory.piece("layer.3", "float32")], step=7, kind="optimizer")
        record.job.wait()
        path = disk.path(record)
        assert load_file(path)["layer.3"].tobytes() == content
        assert read_record(path)["layer.3"].tobytes() == content
        assert path.stat().st_size == record.nbytes


def test_the_header_comes_last_and_the_old_one_goes_first(tmp_path: Path) -> None:
    with disk_in(tmp_path) as disk:
        disk.files.calls.clear()
        first = disk.put(noise(2 * BLOCK))
        assert [(call.offset, call.nbytes) for call in disk.files.named("pwrite")] == [
            (BLOCK, 2 * BLOCK),
            (0, BLOCK),
        ]
        disk.tier.release(first)
        disk.files.calls.clear()
        second, _memory = disk.write(noise(2 * BLOCK, 1))
        second.job.wait()
        offsets = [call.offset for call in disk.files.named("pwrite")]
        assert offsets == [0, BLOCK, 0]


def test_a_file_that_is_written_over_has_no_header_meanwhile(tmp_path: Path) -> None:
    with disk_in(tmp_path) as disk:
        first = disk.put(noise(2 * BLOCK))
        path = disk.path(first)
        disk.tier.release(first)
        disk.files.fail("pwrite", skip=1)
        with disk.files.hold("remove") as hold:
            second, _memory = disk.write(noise(2 * BLOCK, 1))
            assert hold.reached.wait(60)
            assert path.read_bytes()[:BLOCK] == bytes(BLOCK)
        second.job.wait()
        assert isinstance(second.job.error, OSError)


# What cannot be asked


def test_odd_addresses_are_refused(tmp_path: Path) -> None:
    with disk_in(tmp_path) as disk:
        memory = Memory(noise(3 * BLOCK))
        with pytest.raises(ValueError, match="is no multiple of 4096"):
            disk.tier.write([Piece("a", memory.ptr + 512, 100, "uint8")], step=0, kind="activation")
        record = disk.put(noise(BLOCK))
        with pytest.raises(ValueError, match="is no multiple of 4096"):
            disk.tier.read(record, [(0, memory.ptr + 512)])
        for index in (-1, 1):
            with pytest.raises(ValueError, match=f"has 1 pieces, and none of index {index}"):
                disk.tier.read(record, [(index, memory.ptr)])
        assert disk.tier.stats().records == 1


def test_pieces_that_no_record_can_have_are_refused(tmp_path: Path) -> None:
    with disk_in(tmp_path) as disk:
        memory = Memory(noise(BLOCK))
        for pieces in ([], [memory.piece(), memory.piece()], [memory.piece("__metadata__")]):
            with pytest.raises(ValueError, match=r"."):
                disk.tier.write(pieces, step=0, kind="activation")
        stats = disk.tier.stats()
        assert (stats.used, stats.records, stats.reserved) == (0, 0, 0)


def test_a_record_that_is_not_written_cannot_be_read(tmp_path: Path) -> None:
    with disk_in(tmp_path) as disk:
        with disk.files.hold("pwrite") as hold:
            record, _memory = disk.write(noise(BLOCK))
            assert hold.reached.wait(60)
            with pytest.raises(ValueError, match="has not been written: look at its job"):
                disk.tier.read(record, [])
        record.job.wait()
        assert disk.get(record) == [noise(BLOCK)]


# Direct I/O


def test_direct_io_is_used_where_the_file_system_takes_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except OSError:
        pytest.skip("this file system takes no direct I/O")
    with mmap.mmap(-1, BLOCK) as block:
        os.pwritev(fd, [block], 0)
    os.close(fd)
    path.unlink()
    with disk_in(tmp_path) as disk:
        assert disk.tier.stats().direct
        disk.get(disk.put(noise(MIB)))
        assert disk.files.named("sync", "advise_dropped") == []


def test_without_direct_io_data_is_on_the_drive_and_out_of_the_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "tiered_mem.spill"):
        with disk_in(tmp_path, files=FaultyFiles(takes_direct=False)) as disk:
            assert not disk.tier.stats().direct
            disk.files.calls.clear()
            record = disk.put(noise(BLOCK))
            disk.get(record)
            names = [call.operation for call in disk.files.calls if call.operation not in ("stat", "close", "open")]
        assert names == (
            ["create", "allocate", "pwrite", "pwrite", "sync", "advise_dropped", "pread", "pread", "advise_dropped"]
        )
    assert [r.getMessage() for r in caplog.records if "takes no direct I/O" in r.getMessage()] != []


@pytest.mark.parametrize("operation", ["pwrite", "pread"])
@pytest.mark.parametrize("how", [errno.EIO, NOTHING])
def test_direct_io_that_does_not_work_is_not_used(tmp_path: Path, operation: str, how: int) -> None:
    files = FaultyFiles()
    files.fail(operation, how)
    with disk_in(tmp_path, files=files) as disk:
        assert not disk.tier.stats().direct
        assert disk.get(disk.put(noise(BLOCK))) == [noise(BLOCK)]


@pytest.mark.parametrize(
    ("operation", "how"),
    [(operation, errno.EIO) for operation in ("create", "pwrite", "pread", "remove")]
    + [("pwrite", NOTHING), ("pread", NOTHING)],
)
def test_a_folder_in_which_nothing_works_is_refused(tmp_path: Path, operation: str, how: int) -> None:
    files = FaultyFiles()
    files.fail(operation, how, times=9)
    why = "what comes back is not what was written" if how == NOTHING else "Input/output error"
    with pytest.raises(SpillDirRefused, match=rf"cannot be written and read back: .*{why}"):
        DiskTier(tmp_path, capacity=MIB, files=files)
    assert list(tmp_path.iterdir()) == []
    assert open_in(tmp_path) == []
    assert io_threads() == []


def test_records_can_be_read_from_a_file_system_that_became_read_only(tmp_path: Path) -> None:
    class ReadOnly(Files):
        """As on a drive that the kernel has made read-only."""

        def open(self, name: str, flags: int, folder: int) -> int:
            if flags & os.O_RDWR and not flags & os.O_CREAT:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return super().open(name, flags, folder)

    files = ReadOnly()
    folder = SpillFolder(tmp_path, run="r", files=files)
    os.close(folder.create("a"))
    (folder.path / "a").write_bytes(b"x" * BLOCK)
    with pytest.raises(OSError, match="Read-only"):
        folder.open("a", write=True)
    fd = folder.open("a", write=False)
    memory = empty(BLOCK)
    assert files.pread(fd, memory.ptr, BLOCK, 0) == BLOCK
    assert memory.content == b"x" * BLOCK
    os.close(fd)
    folder.close()


def test_where_room_cannot_be_reserved_files_get_their_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with disk_in(tmp_path) as disk:
        for size in (MIB, 2 * MIB, BLOCK):
            record = disk.put(noise(size))
            assert disk.get(record) == [noise(size)]
            disk.tier.release(record)
        assert disk.real_bytes() == disk.tier.stats().reserved == SMALLEST_RECORD


def test_who_watches_hears_of_each_operation(tmp_path: Path) -> None:
    """When its job is done at the latest, and of those that failed too."""
    heard: list[tuple[str, int, float, float]] = []
    with disk_in(tmp_path) as disk:
        disk.put(b"before anybody watches")
        disk.tier.watch(lambda *operation: heard.append(operation))
        began = time.perf_counter()
        record = disk.put(noise(5 * BLOCK))
        assert [each[:2] for each in heard] == [("write", disk.tier.stats().written - 2 * BLOCK)]
        disk.get(record)
        assert heard[1][:2] == ("read", disk.tier.stats().read)
        disk.files.fail("pread")
        disk.damaged(record)
        assert [each[0] for each in heard] == ["write", "read", "read"]
    times = [began, *(moment for each in heard for moment in each[2:]), time.perf_counter()]
    assert times == sorted(times)

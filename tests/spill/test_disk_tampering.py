"""Others change the files of the disk tier: what is not what was written never comes out."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.spill.disks import BLOCK, disk_in
from tests.spill.faulty_files import FaultyFiles
from tests.spill.memory import empty, noise
from tiered_mem.errors import CorruptRecord


def vanish(path: Path, other: Path) -> None:
    path.unlink()


def replace_by_a_copy(path: Path, other: Path) -> None:
    shutil.copyfile(path, path.with_name("copy"))
    path.with_name("copy").rename(path)


def replace_by_another_record(path: Path, other: Path) -> None:
    shutil.copyfile(other, path.with_name("copy"))
    path.with_name("copy").rename(path)


def write_another_record_over_it(path: Path, other: Path) -> None:
    path.write_bytes(other.read_bytes())


def link_to_a_copy(path: Path, other: Path) -> None:
    shutil.copyfile(path, path.with_name("copy"))
    path.unlink()
    path.symlink_to("copy")


def link_twice(path: Path, other: Path) -> None:
    path.with_name("twin").hardlink_to(path)


def make_a_folder_of_it(path: Path, other: Path) -> None:
    path.unlink()
    path.mkdir()


def make_a_pipe_of_it(path: Path, other: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def cut_off_a_block(path: Path, other: Path) -> None:
    os.truncate(path, path.stat().st_size - BLOCK)


def cut_off_a_byte(path: Path, other: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty_it(path: Path, other: Path) -> None:
    os.truncate(path, 0)


def append_a_block(path: Path, other: Path) -> None:
    os.truncate(path, path.stat().st_size + BLOCK)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def flip_a_byte_of_the_header(path: Path, other: Path) -> None:
    flip(path, 200)


def flip_a_space_of_the_header(path: Path, other: Path) -> None:
    flip(path, BLOCK - 1)


def flip_a_byte_of_the_data(path: Path, other: Path) -> None:
    flip(path, BLOCK + 77)


def zero_the_header(path: Path, other: Path) -> None:
    path.write_bytes(bytes(BLOCK) + path.read_bytes()[BLOCK:])


REPLACED = (
    vanish,
    replace_by_a_copy,
    replace_by_another_record,
    link_to_a_copy,
    make_a_folder_of_it,
    make_a_pipe_of_it,
)
CHANGED_LENGTH = (link_twice, cut_off_a_block, cut_off_a_byte, empty_it, append_a_block)
CHANGED_BYTES = (
    write_another_record_over_it,
    flip_a_byte_of_the_header,
    flip_a_space_of_the_header,
    flip_a_byte_of_the_data,
    zero_the_header,
)
Tamper = Callable[[Path, Path], None]


@pytest.mark.parametrize("takes_direct", [True, False], ids=["direct", "cached"])
@pytest.mark.parametrize("tamper", [*REPLACED, *CHANGED_LENGTH, *CHANGED_BYTES])
def test_a_file_that_somebody_changed_is_not_used(tmp_path: Path, tamper: Tamper, takes_direct: bool) -> None:
    size = 2 * BLOCK
    with disk_in(tmp_path, files=FaultyFiles(takes_direct=takes_direct)) as disk:
        record, other = disk.put(noise(size)), disk.put(noise(size, 1))
        path = disk.path(record)
        tamper(path, disk.path(other))
        error = disk.damaged(record)
        assert isinstance(error, CorruptRecord), error
        assert error.path == str(path)
        assert error.expected != error.found
        assert disk.tier.stats().state == "ok", "writing works"
        assert disk.get(other) == [noise(size, 1)]
        disk.tier.release(record)
        third = disk.put(noise(size, 2))
        assert disk.path(third).name != path.name, "it is not used again"
        assert disk.get(third) == [noise(size, 2)]
        if tamper is make_a_folder_of_it:
            path.rmdir()


@pytest.mark.parametrize("tamper", [*REPLACED, *CHANGED_LENGTH])
def test_a_free_file_that_somebody_changed_is_not_used(tmp_path: Path, tamper: Tamper) -> None:
    size = 2 * BLOCK
    with disk_in(tmp_path) as disk:
        record, other = disk.put(noise(size)), disk.put(noise(size, 1))
        path = disk.path(record)
        disk.tier.release(record)
        tamper(path, disk.path(other))
        third = disk.put(noise(size, 2))
        assert disk.path(third).name != path.name
        assert [disk.get(third), disk.get(other)] == [[noise(size, 2)], [noise(size, 1)]]
        assert disk.tier.stats().state == "ok"
        if tamper is make_a_folder_of_it:
            path.rmdir()
        else:
            assert not path.exists()


def test_no_flipped_bit_comes_out(tmp_path: Path) -> None:
    """It is found, or it lies where there is no data."""
    contents = [noise(5000), noise(100, 1)]
    found = 0
    with disk_in(tmp_path) as disk:
        record = disk.put(*contents)
        path = disk.path(record)
        whole = path.read_bytes()
        numbers = random.Random(1)
        for at in [*numbers.sample(range(len(whole)), 150), 0, 7, 8, len(whole) - 1]:
            changed = bytearray(whole)
            changed[at] ^= 1 << numbers.randrange(8)
            path.write_bytes(changed)
            try:
                assert disk.get(record) == contents
            except CorruptRecord:
                found += 1
                assert at < BLOCK + 5000 or 3 * BLOCK <= at < 3 * BLOCK + 100
        assert found > 50
        path.write_bytes(whole)
        assert disk.get(record) == contents


@pytest.mark.parametrize("takes_direct", [True, False], ids=["direct", "cached"])
@pytest.mark.parametrize("size", [0, BLOCK, 2 * BLOCK, 2 * BLOCK + 100])
def test_a_file_that_is_cut_off_while_it_is_read_is_noticed(tmp_path: Path, size: int, takes_direct: bool) -> None:
    """Even without checksums."""
    with disk_in(tmp_path, files=FaultyFiles(takes_direct=takes_direct), checksum="none") as disk:
        record = disk.put(noise(3 * BLOCK))
        with disk.files.hold("pread") as hold:
            job, _memory = disk.read(record)
            assert hold.reached.wait(60)
            os.truncate(disk.path(record), size)
        job.wait()
        assert isinstance(job.error, CorruptRecord)


def test_only_what_is_asked_for_has_to_be_whole(tmp_path: Path) -> None:
    with disk_in(tmp_path) as disk:
        record = disk.put(noise(BLOCK), noise(BLOCK, 1))
        flip(disk.path(record), 2 * BLOCK)
        memory = empty(BLOCK)
        job = disk.tier.read(record, [(0, memory.ptr)])
        job.wait()
        assert job.error is None
        assert memory.content == noise(BLOCK)
        assert isinstance(disk.damaged(record), CorruptRecord)


def test_the_error_names_the_record_that_is_there_instead(tmp_path: Path) -> None:
    with disk_in(tmp_path) as disk:
        record, other = disk.put(noise(BLOCK)), disk.put(noise(BLOCK, 1))
        write_another_record_over_it(disk.path(record), disk.path(other))
        error = disk.damaged(record)
        assert f"expected record {record.number} of run" in str(error)
        assert f"found record {other.number} of run" in str(error)


@pytest.mark.parametrize("takes_direct", [True, False], ids=["direct", "cached"])
def test_a_folder_that_is_gone_fails_in_both_directions(tmp_path: Path, takes_direct: bool) -> None:
    with disk_in(tmp_path, files=FaultyFiles(takes_direct=takes_direct)) as disk:
        record = disk.put(noise(BLOCK))
        home = disk.path(record).parents[1]
        shutil.rmtree(home)
        assert isinstance(disk.damaged(record), CorruptRecord)
        assert isinstance(disk.refused(noise(BLOCK)), OSError)
        assert disk.tier.stats().state == "failing"

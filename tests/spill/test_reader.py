from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.spill.records import UNIT, Sample, sample
from tiered_mem.errors import CorruptRecord
from tiered_mem.spill.reader import read_header, read_record

NUMPY_HAS = "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 float32 float64 complex64 complex128"


@pytest.fixture
def made() -> Sample:
    return sample(("a", "float32", 4000), ("b", "bfloat16", 9000), ("c", "int64", 0))


@pytest.fixture(autouse=True)
def _no_file_stays_open() -> Iterator[None]:
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) <= before  # others may end what they have opened


@pytest.mark.parametrize("dtype", NUMPY_HAS.split())
def test_what_numpy_has_comes_in_its_dtype(tmp_path: Path, dtype: str) -> None:
    made = sample(("x", dtype, 160), ("y", dtype, 8192))
    arrays = read_record(made.write(tmp_path))
    assert [array.dtype.name for array in arrays.values()] == [dtype, dtype]
    assert [array.tobytes() for array in arrays.values()] == [*made.contents]


@pytest.mark.parametrize(
    ("dtype", "nbytes"), [("bfloat16", 160), ("float8_e4m3fn", 5), ("qint8", 5), ("float32", 7), ("complex128", 24)]
)
def test_the_rest_comes_as_bytes(tmp_path: Path, dtype: str, nbytes: int) -> None:
    made = sample(("x", dtype, nbytes))
    path = made.write(tmp_path)
    array = read_record(path)["x"]
    assert (array.dtype, array.shape) == (np.uint8, (nbytes,))
    assert array.tobytes() == made.contents[0]
    assert read_header(path).entries[0].dtype == dtype


def test_arrays_are_memory_of_their_own(tmp_path: Path, made: Sample) -> None:
    path = made.write(tmp_path)
    arrays = read_record(str(path))
    path.write_bytes(bytes(len(made.data)))
    assert [array.tobytes() for array in arrays.values()] == [*made.contents]
    arrays["a"][:] = 1


@pytest.mark.parametrize("algorithm", ["crc32", "xxh3_64", "none"])
def test_the_header_is_read_alone(tmp_path: Path, algorithm: str) -> None:
    made = sample(*((f"block.{i}", "uint8", 1) for i in range(100)), algorithm=algorithm)
    assert made.layout.header_bytes > UNIT
    assert read_header(made.write(tmp_path)) == made.header


@pytest.mark.parametrize("algorithm", ["crc32", "xxh3_64"])
@pytest.mark.parametrize("at", [0, 8999])
def test_a_changed_bit_is_found(tmp_path: Path, algorithm: str, at: int) -> None:
    made = sample(("a", "float32", 4000), ("b", "bfloat16", 9000), algorithm=algorithm)
    data = bytearray(made.data)
    data[made.layout.offsets[1] + at] ^= 1
    path = tmp_path / "record"
    path.write_bytes(data)
    with pytest.raises(CorruptRecord, match=f"{path}: {algorithm} of 'b': expected ") as caught:
        read_record(path)
    assert caught.value.expected == made.header.entries[1].checksum != caught.value.found
    assert read_record(path, verify=False)["b"].tobytes() == data[made.layout.offsets[1] :][:9000]


def test_what_lies_between_entries_has_no_meaning(tmp_path: Path, made: Sample) -> None:
    path = tmp_path / "record"
    path.write_bytes(made.data.replace(b"\xa5" * 96, b"\x5a" * 96))
    assert path.read_bytes() != made.data
    assert [array.tobytes() for array in read_record(path).values()] == [*made.contents]


def test_a_checksum_that_was_never_filled_in_is_not_taken_for_one(tmp_path: Path, made: Sample) -> None:
    blank = replace(made.header, entries=tuple(replace(entry, checksum="") for entry in made.header.entries))
    path = tmp_path / "record"
    path.write_bytes(blank.encode() + made.data[UNIT:])
    with pytest.raises(CorruptRecord, match="expected none yet"):
        read_record(path)
    assert read_record(path, verify=False)["a"].tobytes() == made.contents[0]


@pytest.mark.parametrize("read", [read_header, read_record])
@pytest.mark.parametrize("left", [0, 7, 8, 100, UNIT - 1, UNIT, UNIT + 1, 3 * UNIT])
def test_a_file_cut_short_is_refused(
    tmp_path: Path, made: Sample, left: int, read: Callable[[Path], object]
) -> None:
    path = tmp_path / "record"
    path.write_bytes(made.data[:left])
    with pytest.raises(CorruptRecord, match=str(path)):
        read(path)


@pytest.mark.parametrize("read", [read_header, read_record])
def test_what_cannot_be_opened_is_the_systems_error(
    tmp_path: Path, made: Sample, read: Callable[[Path], object]
) -> None:
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "nothing")
    (tmp_path / "link").symlink_to(made.write(tmp_path))
    with pytest.raises(OSError, match="symbolic links"):
        read(tmp_path / "link")


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, mode in ((tmp_path / "pipe", "prw"), (tmp_path, "drwx"), (Path("/dev/zero"), "crw")):
        with pytest.raises(CorruptRecord, match=f"kind of file: expected a regular file, found {mode}"):
            read_header(path)


def test_reads_that_come_in_parts_are_put_together(
    tmp_path: Path, made: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, path = os.preadv, made.write(tmp_path)
    monkeypatch.setattr(os, "preadv", lambda fd, into, offset: whole(fd, [into[0][:1000]], offset))
    assert [array.tobytes() for array in read_record(path).values()] == [*made.contents]


def test_a_file_that_ends_while_it_is_read_is_refused(
    tmp_path: Path, made: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, path = os.preadv, made.write(tmp_path)

    def shrinking(fd: int, into: list[memoryview], offset: int) -> int:
        if offset == 2 * UNIT:
            os.truncate(path, offset + 50)
        return whole(fd, into, offset)

    monkeypatch.setattr(os, "preadv", shrinking)
    with pytest.raises(CorruptRecord, match="bytes in the file: expected 17192 or more, found 8242"):
        read_record(path)


def test_a_failing_drive_is_the_systems_error(
    tmp_path: Path, made: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(fd: int, into: list[memoryview], offset: int) -> int:
        raise OSError(5, "Input/output error")

    path = made.write(tmp_path)
    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(OSError, match="Input/output error") as caught:
        read_record(path)
    assert not isinstance(caught.value, CorruptRecord)

from __future__ import annotations

import ctypes
import struct
import sys
import threading
from collections.abc import Iterator

import pytest

from tiered_mem.spill.record import DIGITS
from tiered_mem.spill.record_io import checksum_by_name


@pytest.mark.parametrize(
    ("name", "data", "digits"),
    [
        ("crc32", b"123456789", "cbf43926"),
        ("crc32", b"", "00000000"),
        ("xxh3_64", b"", "2d06800538d394c2"),
        ("none", b"123456789", ""),
    ],
)
def test_known_values(name: str, data: bytes, digits: str) -> None:
    checksum = checksum_by_name(name)
    assert checksum.of(memoryview(data)) == digits
    assert len(digits) == DIGITS[name]
    assert checksum.name == name


@pytest.mark.parametrize("name", ["crc32", "xxh3_64"])
def test_memory_at_an_address_is_summed_whatever_its_elements_are(name: str) -> None:
    values = struct.pack("=1000d", *range(1000))
    memory = (ctypes.c_double * 1000)(*range(1000))
    there = (ctypes.c_char * len(values)).from_address(ctypes.addressof(memory))
    of = checksum_by_name(name).of
    assert of(memoryview(there)) == of(memoryview(memory)) == of(memoryview(values))
    ctypes.memset(ctypes.addressof(memory) + 7999, 1, 1)
    assert of(memoryview(there)) != of(memoryview(values))


@pytest.fixture
def only_given_up_locks() -> Iterator[None]:
    """The interpreter takes the GIL from no thread that does not give it up."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("name", ["crc32", "xxh3_64"])
@pytest.mark.usefixtures("only_given_up_locks")
def test_other_threads_run_while_much_is_summed(name: str) -> None:
    data, checksum = memoryview(bytearray(32 << 20)), checksum_by_name(name)

    def runs_meanwhile() -> bool:
        summed: list[str] = []
        thread = threading.Thread(target=lambda: summed.append(checksum.of(data)))
        thread.start()
        meanwhile = not summed
        thread.join()
        assert summed
        return meanwhile

    # It may well be done before this thread gets its turn, but not each time.
    assert any(runs_meanwhile() for _ in range(100))


def test_the_default_is_the_fastest() -> None:
    assert checksum_by_name(None).name == "xxh3_64"
    assert checksum_by_name("crc32").name == "crc32"


@pytest.mark.parametrize("name", ["md5", "", "CRC32"])
def test_an_unknown_name_is_refused_with_those_that_there_are(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is no checksum; there are xxh3_64, crc32, none"):
        checksum_by_name(name)

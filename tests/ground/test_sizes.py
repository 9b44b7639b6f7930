from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_mem.sizes import format_bytes, parse_bytes

pytestmark = pytest.mark.once(why="it needs no device")


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        (1, 1),
        (4096, 4096),
        ("4096", 4096),
        ("1B", 1),
        ("2KB", 2_000),
        ("2KiB", 2_048),
        ("3MB", 3_000_000),
        ("3MiB", 3 << 20),
        ("4GB", 4_000_000_000),
        ("64GiB", 64 << 30),
        ("1TB", 10**12),
        ("1TiB", 1 << 40),
        ("1.5GiB", 3 << 29),
        (".5KiB", 512),
        ("  8 MiB ", 8 << 20),
        ("0.29GB", 290_000_000),
        ("1.9B", 1),
        (2**60 + 1, 2**60 + 1),
    ],
)
def test_sizes_are_read_exactly(size: int | str, nbytes: int) -> None:
    assert parse_bytes(size) == nbytes


@pytest.mark.parametrize(
    "size", [10**500, -(10**500), 10**5000, "9" * 500, "9" * 5000, "9" * 30 + "TiB", 1 << 63], ids=type
)
def test_what_no_file_can_have_is_refused_in_a_few_words(size: int | str) -> None:
    with pytest.raises(ValueError, match=r"^a size (must be|is written)") as caught:
        parse_bytes(size)
    assert len(str(caught.value)) < 120


@settings(deadline=None)
@given(st.integers(1, 10**7), st.sampled_from([("KB", 10**3), ("MB", 10**6), ("GB", 10**9), ("TB", 10**12)]))
def test_thousandths_are_exact(thousandths: int, unit: tuple[str, int]) -> None:
    name, scale = unit
    assert parse_bytes(f"{thousandths // 1000}.{thousandths % 1000:03}{name}") == thousandths * scale // 1000


@pytest.mark.parametrize(
    "size",
    [
        "",
        "GiB",
        "lots",
        "64gib",
        "64G",
        "64PiB",
        "1e9",
        "1,000",
        "1.2.3",
        "12 34",
        "0x10",
        "1GiB/s",
        "inf",
        "nan",
        True,
    ],
)
def test_other_text_is_refused(size: str) -> None:
    with pytest.raises(
        ValueError, match='is not a size; write an int of bytes or a string such as "64GiB"'
    ) as error:
        parse_bytes(size)
    assert str(error.value).startswith(f"{size!r} ")


@pytest.mark.parametrize("size", [0, -1, "0", "-5MiB", "0GiB", "0.9B", "0.0001KiB"])
def test_less_than_a_byte_is_refused(size: int | str) -> None:
    with pytest.raises(ValueError, match=r"^a size must be at least 1 byte, not ") as error:
        parse_bytes(size)
    assert str(error.value).endswith(repr(size))


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (96 << 20, "96.0 MiB"),
        (64 << 30, "64.0 GiB"),
        (3 << 40, "3.0 TiB"),
        (5000 << 40, "5000.0 TiB"),
        (-1536, "-1.5 KiB"),
    ],
)
def test_sizes_are_written_in_the_unit_that_suits(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@settings(deadline=None)
@given(st.integers(1, 1 << 50))
def test_what_is_written_can_be_read_back(nbytes: int) -> None:
    assert parse_bytes(format_bytes(nbytes)) == pytest.approx(nbytes, rel=0.05)

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.torch import load_file

from tests.spill.records import UNIT, Sample, forged, header, sample, text_of, tree_of
from tiered_mem.errors import CorruptRecord
from tiered_mem.spill.record import ALIGNMENT, DIGITS, Entry, Header, header_bytes_of, parse_header

DOCS = Path(__file__).parents[2] / "docs" / "spill_format.md"
DTYPES = sorted(
    str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)
)
# Those that safetensors has a name for.
STORED_AS_THEY_ARE = {
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex64"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
}

names = st.text(max_size=20).filter(lambda name: name != "__metadata__" and not name.startswith("__pad__."))
entries = st.lists(
    st.tuples(names, st.sampled_from([*DTYPES, "float6_of_another_day"]), st.integers(0, 3 * UNIT)),
    min_size=1,
    max_size=12,
    unique_by=lambda entry: entry[0],
)
samples = st.builds(lambda some, algorithm: sample(*some, algorithm=algorithm), entries, st.sampled_from([*DIGITS]))


def parsed(data: bytes) -> Header:
    """The header of a whole file."""
    return parse_header(data[: header_bytes_of(data, len(data), "a file")], len(data), "a file")


@settings(deadline=None)
@given(samples)
def test_a_record_is_a_safetensors_file_of_its_entries(made: Sample) -> None:
    found = dict(deserialize(made.data))
    fillers = {name for name in found if name.startswith("__pad__.")}
    assert found.keys() - fillers == set(made.names)
    for name, content in zip(made.names, made.contents, strict=True):
        assert bytes(found[name]["data"]) == content


@settings(deadline=None)
@given(samples)
def test_a_header_reads_back_as_it_was_written(made: Sample) -> None:
    assert parsed(made.data) == made.header


@settings(deadline=None)
@given(samples)
def test_everything_lies_at_multiples_of_4096(made: Sample) -> None:
    layout = made.header.layout()
    assert ALIGNMENT == UNIT
    assert not [at for at in (layout.header_bytes, layout.file_bytes, *layout.offsets) if at % UNIT]
    assert len(made.header.encode()) == layout.header_bytes
    assert len(made.data) == layout.file_bytes
    for offset, content in zip(layout.offsets, made.contents, strict=True):
        assert made.data[offset:][: len(content)] == content


@settings(deadline=None)
@given(samples)
def test_the_header_is_as_long_before_the_checksums_are_known(made: Sample) -> None:
    unknown = replace(made.header, entries=tuple(replace(e, checksum="") for e in made.header.entries))
    assert len(unknown.encode()) == len(made.header.encode())
    assert unknown.layout() == made.header.layout()
    assert parse_header(unknown.encode(), len(made.data), "a file") == unknown


@pytest.mark.parametrize("dtype", DTYPES)
def test_safetensors_reads_every_dtype(tmp_path: Path, dtype: str) -> None:
    made = sample(("first", dtype, 96), ("block.17", dtype, 5008))
    path = made.write(tmp_path)
    loaded = load_file(path)
    stored = dtype if dtype in STORED_AS_THEY_ARE else "float64" if dtype == "complex128" else "uint8"
    for name, content in zip(made.names, made.contents, strict=True):
        assert loaded[name].dtype == getattr(torch, stored)
        assert loaded[name].dim() == 1
        assert bytes(loaded[name].view(torch.uint8).tolist()) == content
        with safe_open(path, "pt") as file:
            assert torch.equal(file.get_tensor(name).view(torch.uint8), loaded[name].view(torch.uint8))
            assert file.metadata()[f"dtype.{name}"] == dtype


def test_complex_numbers_come_back_as_pairs(tmp_path: Path) -> None:
    made = sample(("z", "complex128", 160))
    numbers = torch.frombuffer(bytearray(made.contents[0]), dtype=torch.complex128)
    loaded = load_file(made.write(tmp_path))["z"].view(torch.complex128)
    assert torch.equal(loaded.view(torch.uint8), numbers.view(torch.uint8))


def test_fillers_are_where_something_is_to_be_filled() -> None:
    made = sample(("a", "uint8", 4095), ("b", "uint8", 4096), ("c", "uint8", 0), ("d", "uint8", 4097))
    tree = tree_of(made.data)
    assert list(tree) == ["__metadata__", "a", "__pad__.0", "b", "c", "d", "__pad__.3"]
    assert tree["__pad__.0"] == {"dtype": "U8", "shape": [1], "data_offsets": [4095, 4096]}


def test_a_broken_number_of_elements_goes_as_bytes() -> None:
    made = sample(("half", "float32", 4098))
    assert tree_of(made.data)["half"] == {"dtype": "U8", "shape": [4098], "data_offsets": [0, 4098]}
    assert parsed(made.data).entries[0].dtype == "float32"


def test_the_metadata_says_what_is_in_the_record(tmp_path: Path) -> None:
    made = sample(("a", "bfloat16", 10), algorithm="xxh3_64")
    with safe_open(made.write(tmp_path), "pt") as file:
        found = file.metadata()
    crc = found.pop("header_crc32")
    assert len(crc) == 8
    assert found == {
        "spill_format": "1",
        "run": "run-7",
        "number": "3",
        "write": "5",
        "step": "11",
        "kind": "activation",
        "algorithm": "xxh3_64",
        "dtype.a": "bfloat16",
        "checksum.a": made.header.entries[0].checksum,
    }


def test_the_example_in_the_docs_is_a_header() -> None:
    made = sample(("block.17", "bfloat16", 10000), ("block.18", "complex128", 4096), algorithm="xxh3_64")
    example = re.search(r"```json\n(\{.*?)```", DOCS.read_text(), re.DOTALL)
    assert example is not None
    assert re.sub(r"\n ?", "", example[1]) == text_of(made.data).decode()


def test_a_long_header_takes_more_than_one_unit() -> None:
    made = sample(*((f"block.{i}", "uint8", 1) for i in range(100)))
    assert made.layout.header_bytes > 2 * UNIT
    assert parsed(made.data) == made.header


def test_a_header_too_long_for_safetensors_is_refused() -> None:
    long = header(Entry("\1" * (100_000_000 // 18), "uint8", 1))
    with pytest.raises(
        ValueError, match=r"1 entries make a header of \d+ bytes, safetensors reads 100000000 at most"
    ):
        long.layout()


def test_without_its_header_a_record_is_none(tmp_path: Path) -> None:
    made = sample(("a", "float32", 400))
    unfinished = bytes(UNIT) + made.data[UNIT:]
    path = tmp_path / "unfinished"
    path.write_bytes(unfinished)
    with pytest.raises(SafetensorError):
        safe_open(path, "pt").__enter__()
    with pytest.raises(CorruptRecord, match="a file: its write was not finished: expected a header, found zeros"):
        parsed(unfinished)


def test_each_bit_of_a_header_matters() -> None:
    made = sample(("a", "float32", 400), ("b", "int8", 1))
    whole = bytearray(made.header.encode())
    for bit in range(8 * len(whole)):
        whole[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptRecord):
            parse_header(bytes(whole), len(made.data), "a file")
        whole[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("at", [100, 400, UNIT - 1], ids=["text", "tensors", "padding"])
def test_a_damaged_header_is_told_by_its_checksum(at: int) -> None:
    """Before its JSON is read, which damage can make as large and deep as it likes."""
    made = sample(("a", "float32", 400), ("b", "int8", 1))
    data = bytearray(made.header.encode())
    data[at] ^= 1
    with pytest.raises(CorruptRecord, match="checksum of the header"):
        parse_header(bytes(data), len(made.data), "a file")


@pytest.mark.parametrize("more", [-UNIT, -1, 1, UNIT])
def test_a_file_of_another_length_is_refused(more: int) -> None:
    made = sample(("a", "float32", 400), ("b", "int8", 1))
    with pytest.raises(CorruptRecord, match="length of the file") as caught:
        parse_header(made.header.encode(), len(made.data) + more, "a file")
    assert (caught.value.expected, caught.value.found) == (len(made.data), len(made.data) + more)


@pytest.mark.parametrize("more", [-1, 1])
def test_a_header_read_in_part_is_refused(more: int) -> None:
    made = sample(("a", "float32", 400))
    with pytest.raises(CorruptRecord, match="length of the header read"):
        parse_header(made.data[: UNIT + more], len(made.data), "a file")


@pytest.mark.parametrize(("start", "file_bytes"), [(b"", 0), (b"\xf8\x0f", 2), (b"\xf8\x0f", 2 * UNIT)])
def test_a_length_read_in_part_is_refused(start: bytes, file_bytes: int) -> None:
    with pytest.raises(CorruptRecord, match=f"header's length: expected 8 bytes or more, found {len(start)}"):
        header_bytes_of(start, file_bytes, "a file")


@pytest.mark.parametrize("length", [1, UNIT - 9, UNIT - 7, 3 * UNIT - 8, 100_003_832, 1 << 63, (1 << 64) - 1])
def test_a_length_that_cannot_be_is_refused(length: int) -> None:
    with pytest.raises(CorruptRecord, match=f"length of the header: expected .*, found {length + 8}"):
        header_bytes_of(length.to_bytes(8, "little"), 2 * UNIT if length < 99_999_999 else 1 << 62, "a file")


def test_another_version_of_the_format_is_told_apart() -> None:
    made = sample(("a", "float32", 400))
    other = forged(text_of(made.data).replace(b'"spill_format":"1"', b'"spill_format":"2"'))
    with pytest.raises(CorruptRecord, match="a file: format: expected"):
        parse_header(other, len(made.data), "a file")


def test_the_seal_of_the_tests_is_the_headers_own() -> None:
    made = sample(("a", "float32", 400))
    assert forged(text_of(made.data)) == made.header.encode()


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: header(Entry("a", "int8", 1), Entry("a", "int8", 1)), "2 entries share names"),
        (lambda: Header("r", 0, 0, 0, "k", "none", ()), "at least one entry"),
        (lambda: Header("r", -1, 0, 0, "k", "none", (Entry("a", "int8", 1),)), "number is -1"),
        (lambda: Header("r", 0, True, 0, "k", "none", (Entry("a", "int8", 1),)), "write is True"),
        (lambda: Header("r", 0, 0, 1 << 63, "k", "none", (Entry("a", "int8", 1),)), "step is 9223372036854775808"),
        (lambda: header(algorithm="md5"), "the algorithm 'md5' is none of xxh3_64, crc32, none"),
        (lambda: header(run="\udfff"), "no text that UTF-8 can hold"),
        (lambda: header(Entry("a", "int8", 1, "1234")), "'1234' is not 8 hex digits of crc32"),
        (lambda: header(Entry("a", "int8", 1, "--------")), "not 8 hex digits"),
        (lambda: header(Entry("a", "int8", 1, "12345678"), algorithm="none"), "not 0 hex digits of none"),
        (lambda: header(Entry("a", "int8", 1 << 62), Entry("b", "int8", 1 << 62)), "length of the data"),
        (lambda: Entry("__metadata__", "int8", 1), "choose another"),
        (lambda: Entry("__pad__.x", "int8", 1), "choose another"),
        (lambda: Entry("a", "int8", -1), "nbytes is -1"),
        (lambda: Entry("\ud800", "int8", 1), "no text that UTF-8 can hold"),
    ],
)
def test_values_that_no_record_can_have_are_refused(made: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made()

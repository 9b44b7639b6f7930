"""Records: the disk tier's files. Each is a valid safetensors file that fits direct I/O; docs/spill_format.md.

The safetensors package is not used to write them: it lays tensors end to end, and direct I/O straight from host
memory needs each on a boundary of 4096 bytes, and the header last.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..allocators.base import round_up
from ..errors import CorruptRecord

# The hex digits of each checksum. A header can be read, and its length known, where the algorithm is missing.
DIGITS = {"xxh3_64": 16, "crc32": 8, "none": 0}
ALIGNMENT = 4096
# safetensors reads no longer ones.
MAX_HEADER_TEXT = 100_000_000
# The version and the header's own checksum lie at fixed places: a damaged header is known before its JSON is read.
_START = b'{"__metadata__":{"spill_format":"1","header_crc32":"'
_FIELD = slice(8 + len(_START), 8 + len(_START) + 8)
_ZEROS = b"00000000"
_LENGTH_BYTES = 8
# What is found in a header's place while its record is written.
NO_HEADER = "zeros"
_FILLER = "__pad__."
_LIMIT = 1 << 63


@dataclass(frozen=True, slots=True)
class Header:
    """The description of a record that comes before its data.

    run: the id of the run that writes it. number: the record's number in the run. write: a counter that differs for
    each write. step: the training step. kind: of its contents, such as "activation". algorithm: of the entries'
    checksums, a name in DIGITS.

    Raises ValueError for values that no record can have.
    """

    run: str
    number: int
    write: int
    step: int
    kind: str
    algorithm: str
    entries: tuple[Entry, ...]

    def __post_init__(self) -> None:
        _check_text("run", self.run)
        _check_text("kind", self.kind)
        for what in ("number", "write", "step"):
            _check_int(what, getattr(self, what))
        if self.algorithm not in DIGITS:
            raise ValueError(f"the algorithm {self.algorithm!r} is none of {', '.join(DIGITS)}")
        if not self.entries:
            raise ValueError("a record has at least one entry")
        if len({entry.name for entry in self.entries}) < len(self.entries):
            raise ValueError(f"{len(self.entries)} entries share names")
        digits = DIGITS[self.algorithm]
        for entry in self.entries:
            if entry.checksum and re.fullmatch(f"[0-9a-f]{{{digits}}}", entry.checksum) is None:
                raise ValueError(f"{entry.checksum!r} is not {digits} hex digits of {self.algorithm}")
        _check_int("length of the data", sum(round_up(entry.nbytes) for entry in self.entries))

    def layout(self) -> Layout:
        """The places of the record's parts in its file."""
        header_bytes = round_up(_LENGTH_BYTES + len(self._text()))
        offsets, end = [], header_bytes
        for entry in self.entries:
            offsets.append(end)
            end += round_up(entry.nbytes)
        return Layout(header_bytes, tuple(offsets), end)

    def encode(self) -> bytes:
        """The file's first bytes. Their number, that of layout(), does not depend on the checksums.

        A record is whole once they are in its file, so they are written last.
        """
        text = self._text()
        length = round_up(_LENGTH_BYTES + len(text)) - _LENGTH_BYTES
        return _sealed(length.to_bytes(_LENGTH_BYTES, "little") + text.ljust(length, b" "))

    def _text(self) -> bytes:
        about = {
            "spill_format": "1",
            "header_crc32": _ZEROS.decode(),
            "run": self.run,
            "number": str(self.number),
            "write": str(self.write),
            "step": str(self.step),
            "kind": self.kind,
            "algorithm": self.algorithm,
        }
        unknown = _unknown(self.algorithm)
        for entry in self.entries:
            about[f"dtype.{entry.name}"] = entry.dtype
            about[f"checksum.{entry.name}"] = entry.checksum or unknown
        tree: dict[str, object] = {"__metadata__": about, **dict(self._tensors())}
        text = json.dumps(tree, separators=(",", ":")).encode("ascii")
        if round_up(_LENGTH_BYTES + len(text)) - _LENGTH_BYTES > MAX_HEADER_TEXT:
            raise ValueError(
                f"{len(self.entries)} entries make a header of {len(text)} bytes, safetensors reads "
                f"{MAX_HEADER_TEXT} at most; write more records of fewer entries, or shorter names"
            )
        return text

    def _tensors(self) -> Iterator[tuple[str, dict[str, object]]]:
        start = 0
        for index, entry in enumerate(self.entries):
            end = start + entry.nbytes
            yield entry.name, _tensor(*entry.stored_as(), start, end)
            start = round_up(end)
            if start > end:
                yield f"{_FILLER}{index}", _tensor("U8", start - end, end, start)


@dataclass(frozen=True, slots=True)
class Entry:
    """A flat tensor in a record.

    name: its key in the file. dtype: torch's name without "torch.". checksum: hex digits over its bytes; "" where
    checksums are off or not known yet.

    Raises ValueError for values that no entry can have.
    """

    name: str
    dtype: str
    nbytes: int
    checksum: str = ""

    def __post_init__(self) -> None:
        _check_text("name", self.name)
        _check_text("dtype", self.dtype)
        _check_int("nbytes", self.nbytes)
        if self.name == "__metadata__" or self.name.startswith(_FILLER):
            raise ValueError(f"the name {self.name!r} means something else in the format; choose another")

    def stored_as(self) -> tuple[str, int]:
        """Its dtype in safetensors, U8 where safetensors has none for it, and its number of elements there."""
        dtype, bits = STORED.get(self.dtype, _BYTES)
        if self.nbytes * 8 % bits:
            dtype, bits = _BYTES
        return dtype, self.nbytes * 8 // bits


@dataclass(frozen=True, slots=True)
class Layout:
    """The places of a record's parts in its file, in bytes, all multiples of ALIGNMENT.

    offsets: the start of each entry. The bytes between an entry's end and the next multiple have no meaning.
    """

    header_bytes: int
    offsets: tuple[int, ...]
    file_bytes: int


# torch's dtypes that safetensors knows: its name for them, and the bits of one element there.
STORED = {
    "bool": ("BOOL", 8),
    "uint8": ("U8", 8),
    "int8": ("I8", 8),
    "uint16": ("U16", 16),
    "int16": ("I16", 16),
    "uint32": ("U32", 32),
    "int32": ("I32", 32),
    "uint64": ("U64", 64),
    "int64": ("I64", 64),
    "float4_e2m1fn_x2": ("F4", 4),
    "float8_e4m3fn": ("F8_E4M3", 8),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 8),
    "float8_e5m2": ("F8_E5M2", 8),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 8),
    "float8_e8m0fnu": ("F8_E8M0", 8),
    "float16": ("F16", 16),
    "bfloat16": ("BF16", 16),
    "float32": ("F32", 32),
    "float64": ("F64", 64),
    "complex64": ("C64", 64),
    "complex128": ("F64", 64),
}
_BYTES = ("U8", 8)


def header_bytes_of(start: bytes, file_bytes: int, path: str) -> int:
    """The length of a record's header, read from the first 8 bytes of its file. Raises CorruptRecord."""
    if len(start) < _LENGTH_BYTES:
        expected = f"{_LENGTH_BYTES} bytes or more"
        raise CorruptRecord(path, "the file ends in its header's length", expected=expected, found=len(start))
    text_bytes = int.from_bytes(start[:_LENGTH_BYTES], "little")
    if text_bytes == 0:
        raise CorruptRecord(path, "its write was not finished", expected="a header", found=NO_HEADER)
    header_bytes = _LENGTH_BYTES + text_bytes
    if header_bytes % ALIGNMENT or header_bytes > file_bytes or text_bytes > MAX_HEADER_TEXT:
        limit = min(file_bytes, _LENGTH_BYTES + MAX_HEADER_TEXT)
        expected = f"a multiple of {ALIGNMENT} up to {limit}"
        raise CorruptRecord(path, "length of the header", expected=expected, found=header_bytes)
    return header_bytes


def parse_header(data: bytes, file_bytes: int, path: str) -> Header:
    """The header in `data`, the first header_bytes_of() bytes of a file.

    file_bytes: the length of the whole file. Raises CorruptRecord for any byte that encode() would not write there,
    and for another length of the file.
    """
    header_bytes = header_bytes_of(data, file_bytes, path)
    if len(data) != header_bytes:
        raise CorruptRecord(path, "length of the header read", expected=header_bytes, found=len(data))
    start = data[_LENGTH_BYTES : _FIELD.start]
    if start != _START:
        raise CorruptRecord(path, "format", expected=_START, found=start)
    if (sealed := _sealed(data)) != data:
        raise CorruptRecord(path, "checksum of the header", expected=data[_FIELD], found=sealed[_FIELD])
    try:
        header = _decoded(data[_LENGTH_BYTES:])
        encoded = header.encode()
    # JSON may hold anything where a number or an object should be, and json itself knows several errors.
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise CorruptRecord(
            path, "values in the header", expected="a record's", found=_brief(repr(error))
        ) from error
    if encoded != data:
        raise CorruptRecord(path, "text of the header", expected=f"that of {_brief(repr(header))}", found="another")
    if (whole := header.layout().file_bytes) != file_bytes:
        raise CorruptRecord(path, "length of the file in bytes", expected=whole, found=file_bytes)
    return header


def _decoded(text: bytes) -> Header:
    # Only whether these values encode to this text again says that it is well formed.
    tree: dict[str, Any] = json.loads(text)
    about = tree.pop("__metadata__")
    unknown = _unknown(about["algorithm"])
    entries = []
    for name, tensor in tree.items():
        if not name.startswith(_FILLER):
            start, end = tensor["data_offsets"]
            checksum = about[f"checksum.{name}"]
            entries.append(
                Entry(name, about[f"dtype.{name}"], end - start, "" if checksum == unknown else checksum)
            )
    number, write, step = (int(about[key]) for key in ("number", "write", "step"))
    return Header(about["run"], number, write, step, about["kind"], about["algorithm"], tuple(entries))


def _sealed(data: bytes) -> bytes:
    """A header with its own checksum, computed with zeros in the checksum's place."""
    before, after = data[: _FIELD.start], data[_FIELD.stop :]
    crc = zlib.crc32(after, zlib.crc32(_ZEROS, zlib.crc32(before)))
    return before + f"{crc:08x}".encode() + after


def _tensor(dtype: str, elements: int, start: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": [elements], "data_offsets": [start, end]}


def _unknown(algorithm: str) -> str:
    return "-" * DIGITS[algorithm]


def _check_text(what: str, text: str) -> None:
    if type(text) is not str:
        raise ValueError(f"the {what} is {text!r}, not a str")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"the {what} {text!r} is no text that UTF-8 can hold") from None


def _check_int(what: str, number: int) -> None:
    # True and 1.0 are equal to 1, but JSON writes them otherwise.
    if type(number) is not int or not 0 <= number < _LIMIT:
        raise ValueError(f"the {what} is {number!r}, not an int from 0 to 2**63 - 1")


def _brief(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."


def check_address(ptr: int) -> None:
    """Raises ValueError for one at which no piece of a record can be read or written."""
    if ptr % ALIGNMENT:
        raise ValueError(f"{ptr:#x} is no multiple of {ALIGNMENT}")

"""Whole records, and headers put together without the code under test."""

from __future__ import annotations

import json
import random
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tiered_mem.spill.record import Entry, Header, Layout
from tiered_mem.spill.record_io import checksum_by_name

UNIT = 4096
# What lies between entries, to show that it may be anything.
FILLING = b"\xa5"


@dataclass(frozen=True)
class Sample:
    """A record's file, and what was put into it."""

    header: Header
    contents: tuple[bytes, ...]
    data: bytes

    @property
    def layout(self) -> Layout:
        return self.header.layout()

    @property
    def names(self) -> list[str]:
        return [entry.name for entry in self.header.entries]

    def write(self, folder: Path) -> Path:
        path = folder / f"{self.header.number}.safetensors"
        path.write_bytes(self.data)
        return path


def header(*entries: Entry, algorithm: str = "crc32", run: str = "run-7", write: int = 5) -> Header:
    return Header(run, 3, write, 11, "activation", algorithm, entries or (Entry("block.17", "float32", 4000),))


def sample(
    *entries: tuple[str, str, int], algorithm: str = "crc32", run: str = "run-7", write: int = 5, seed: int = 0
) -> Sample:
    """A record of (name, dtype, nbytes) with random bytes in it."""
    rng, checksum = random.Random(seed), checksum_by_name(algorithm)
    described = tuple(Entry(*entry) for entry in entries)
    contents = tuple(rng.randbytes(entry.nbytes) for entry in described)
    summed = (replace(e, checksum=checksum.of(memoryview(c))) for e, c in zip(described, contents, strict=True))
    made = header(*summed, algorithm=algorithm, run=run, write=write)
    data = b"".join(c + FILLING * (-len(c) % UNIT) for c in contents)
    return Sample(made, contents, made.encode() + data)


def text_of(data: bytes) -> bytes:
    """The JSON of a header, without the spaces behind it."""
    return data[8 : 8 + int.from_bytes(data[:8], "little")].rstrip(b" ")


def tree_of(data: bytes) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(text_of(data))
    return tree


def forged(text: bytes) -> bytes:
    """A header of any text, padded, and with a checksum over it that is right if it has a place for one."""
    text = text.ljust(-(-(8 + len(text)) // UNIT) * UNIT - 8, b" ")
    data = len(text).to_bytes(8, "little") + text
    mark = b'"header_crc32":"'
    at = data.find(mark) + len(mark)
    if at < len(mark):
        return data
    data = data[:at] + b"00000000" + data[at + 8 :]
    return data[:at] + f"{zlib.crc32(data):08x}".encode() + data[at + 8 :]

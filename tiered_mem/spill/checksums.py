"""Checksums of the data in a spill file, by name."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

# The hex digits of each algorithm. A header can be read, and its length known, where the algorithm is missing.
DIGITS = {"xxh3_64": 16, "crc32": 8, "none": 0}


class Checksum(Protocol):
    """One algorithm. The GIL is released while it works on large data."""

    @property
    def name(self) -> str: ...

    def of(self, data: memoryview, /) -> str:
        """The checksum of contiguous memory, as lower-case hex digits. Nothing is copied."""
        ...


def checksum_by_name(name: str | None) -> Checksum:
    """One of DIGITS; for None "xxh3_64" where xxhash is installed, else "crc32".

    Raises ValueError for another name, and ImportError for "xxh3_64" where xxhash is not installed.
    """
    if name is not None and name not in DIGITS:
        raise ValueError(f"{name!r} is no checksum; there are {', '.join(DIGITS)}, and None for the fastest")
    if name in (None, "xxh3_64"):
        try:
            import xxhash
        except ImportError:
            if name is not None:
                raise ImportError(
                    'the checksum "xxh3_64" needs xxhash: install it (pip install xxhash), or use "crc32"'
                ) from None
        else:
            return _Function("xxh3_64", xxhash.xxh3_64_hexdigest)
    return _Function("none", _no_digits) if name == "none" else _Function("crc32", _crc32)


@dataclass(frozen=True, slots=True)
class _Function:
    name: str
    of: Callable[[memoryview], str]


def _crc32(data: memoryview) -> str:
    return f"{zlib.crc32(data):08x}"


def _no_digits(data: memoryview) -> str:
    return ""

"""Sizes in bytes as people write them: 4096, "512MiB", "64GiB". And seconds."""

from __future__ import annotations

import re
from fractions import Fraction

_UNITS = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
# No file is larger.
_LARGEST = (1 << 63) - 1
_LONGEST = 40


def parse_bytes(size: int | str, name: str = "") -> int:
    """A number of bytes, from an int or a string such as "64GiB".

    name: what it is the size of, for errors. Raises ValueError below 1, from 8 EiB on, for a fraction of a byte,
    and for all else.
    """
    try:
        return _parsed(size)
    except ValueError as error:
        raise ValueError(f"{name}: {error}" if name else str(error)) from None


def _parsed(size: int | str) -> int:
    # Python does not write ints of thousands of digits, and nobody reads those of hundreds.
    if isinstance(size, int) and abs(size) > _LARGEST:
        raise ValueError(
            f"a size must be 1 byte or more and below 8 EiB, and this int has {size.bit_length()} bits"
        )
    if len(str(size)) > _LONGEST:
        raise ValueError(f'a size is written like 4096 or "64GiB", and this text has {len(str(size))} characters')
    if isinstance(size, float) and size % 1:
        raise ValueError(f"a size is a whole number of bytes, not {size}")
    match = re.fullmatch(r"\s*(-?\d*\.?\d+)\s*([A-Za-z]*)\s*", str(size))
    if match is None or match[2] not in _UNITS:
        raise ValueError(f'{size!r} is not a size; write an int of bytes or a string such as "64GiB"')
    nbytes = int(Fraction(match[1]) * _UNITS[match[2]])
    if nbytes < 1:
        raise ValueError(f"a size must be at least 1 byte, not {size!r}")
    if nbytes > _LARGEST:
        raise ValueError(f"a size must be below 8 EiB, not {size!r}")
    return nbytes


def format_bytes(nbytes: int) -> str:
    """Such as "96.0 MiB"."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def format_seconds(seconds: float) -> str:
    """Such as "1.2 ms", and "12.5 s" from ten on."""
    return f"{seconds * 1e3:.1f} ms" if seconds < 10 else f"{seconds:.1f} s"

"""Sizes and rates as people write them: 4096, "512MiB", "4GB/s"."""

import re
from fractions import Fraction

from ascend_emulator.errors import EmulatorError

_UNITS = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}


def parse_bytes(size: int | str) -> int:
    """A number of bytes, at least 1, from an int or a string such as "2GiB" or "4GB"."""
    nbytes = _parse(size)
    if nbytes < 1:
        raise EmulatorError(f"a size must be at least 1 byte, not {size!r}")
    return nbytes


def parse_limit(size: int | str) -> int:
    """A number of bytes; 0 stands for no limit."""
    return _parse(size)


def parse_rate(rate: int | str) -> int:
    """Bytes per second, from an int or a string such as "4GB/s"; 0 stands for no limit."""
    return _parse(rate, per="(?:/s)?")


def _parse(size: int | str, per: str = "") -> int:
    match = re.fullmatch(rf"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*){per}\s*", str(size))
    if match is None or match[2] not in _UNITS:
        raise EmulatorError(f'{size!r} is not a size; write it like 4096, "512MiB", "2GB" or "4GB/s"')
    return int(Fraction(match[1]) * _UNITS[match[2]])

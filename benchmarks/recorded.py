"""An allocation trace: what a pool is asked, written down line by line, and read back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

from tiered_mem.allocators import HostPool, Region

_FIRST_LINE = "allocation-trace 1"


class RecordedPool:
    """A `HostPool` over `pool` that writes an allocation trace to `file`, for `read_trace`. Not thread-safe.

    A trace is text. Its first line is "allocation-trace 1"; each other line is one operation:

        allocate 7 4096
        deallocate 7
        mark step 3

    that is a region of 4096 bytes that has the number 7 from now on, its return, and mark("step 3"). Numbers count
    from 0. A request that fails is not written. Neither the pool nor the file is closed by it.
    """

    def __init__(self, pool: HostPool, file: TextIO) -> None:
        self._pool = pool
        self._file = file
        self._numbers: dict[Region, int] = {}
        self._next_number = 0
        self.slab, self.footprint, self.trim, self.stats = pool.slab, pool.footprint, pool.trim, pool.stats
        self._write(_FIRST_LINE)

    def allocate(self, nbytes: int) -> Region:
        region = self._pool.allocate(nbytes)
        self._write(f"allocate {self._next_number} {nbytes}")
        self._numbers[region] = self._next_number
        self._next_number += 1
        return region

    def deallocate(self, region: Region) -> None:
        self._pool.deallocate(region)
        self._write(f"deallocate {self._numbers.pop(region)}")

    def mark(self, name: str) -> None:
        """Write a mark, such as "step 3" where a step begins. Raises ValueError if it is not one line of text."""
        if not name.strip() or name.splitlines() != [name]:
            raise ValueError(f"a mark is one line of text, got {name!r}")
        self._write(f"mark {name.strip()}")

    def close(self) -> None:
        """The pool stays open."""

    def _write(self, line: str) -> None:
        self._file.write(line + "\n")


@dataclass(frozen=True, slots=True)
class Allocated:
    """A region of `nbytes` bytes was allocated, and has this number until it is deallocated."""

    number: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Deallocated:
    """The region of this number was given back."""

    number: int


@dataclass(frozen=True, slots=True)
class Marked:
    """The user's `RecordedPool.mark(name)`."""

    name: str


Operation = Allocated | Deallocated | Marked


def read_trace(file: TextIO) -> Iterator[Operation]:
    """Yield the operations of an allocation trace, in their order.

    Raises ValueError, which names the line, for what is not an allocation trace of version 1.
    """
    first = file.readline().rstrip("\n")
    if first != _FIRST_LINE:
        raise ValueError(f"line 1: an allocation trace begins with {_FIRST_LINE!r}, not with {first[:80]!r}")
    live: set[int] = set()
    for position, line in enumerate(file, start=2):
        try:
            operation = _operation(line.rstrip("\n"))
            _follow(operation, live)
        except ValueError as error:
            raise ValueError(f"line {position}: {error}") from None
        yield operation


def _operation(line: str) -> Operation:
    match line.split():
        case ["allocate", number, nbytes]:
            return Allocated(_whole(number), _whole(nbytes))
        case ["deallocate", number]:
            return Deallocated(_whole(number))
        case ["mark", _, *_]:
            return Marked(line.removeprefix("mark "))
    raise ValueError(f"{line[:80]!r} is no operation")


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{text[:80]!r} is no whole number")
    return int(text)


def _follow(operation: Operation, live: set[int]) -> None:
    match operation:
        case Allocated(number, nbytes):
            if nbytes == 0:
                raise ValueError(f"region {number} has no bytes")
            if number in live:
                raise ValueError(f"region {number} is allocated already")
            live.add(number)
        case Deallocated(number):
            if number not in live:
                raise ValueError(f"region {number} is not allocated")
            live.remove(number)

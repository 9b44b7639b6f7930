"""Host memory as every source gives it: regions, the protocol, and its errors."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol

from ..sizes import format_bytes

ALIGNMENT = 4096


class HostMemory(Protocol):
    """A source of host memory. Every method may be called from any thread.

    Sizes are in bytes. The contents of new memory are undefined. A region is valid until it is
    deallocated, and no longer than the `HostMemory` it came from.
    """

    def allocate(self, nbytes: int) -> Region:
        """Return `nbytes` bytes that start on a 4096-byte boundary.

        Raises ValueError if `nbytes` is not positive, OutOfHostMemory if there is not enough memory,
        and RuntimeError once closed.
        """
        ...

    def deallocate(self, region: Region) -> None:
        """Take back a region. Raises ValueError if it is unknown here or was freed already."""
        ...

    def footprint(self, nbytes: int) -> int:
        """Return how much memory a region of `nbytes` takes, with what rounding and bookkeeping add."""
        ...

    def close(self) -> None:
        """Release everything held. Idempotent.

        Raises RuntimeError, and changes nothing, while regions are still allocated.
        """
        ...


class HostPool(HostMemory, Protocol):
    """A `HostMemory` that cuts its regions out of larger slabs, and keeps count."""

    def slab(self, region: Region) -> Region:
        """Return the slab that an allocated region lies in. Raises ValueError if it is not allocated here."""
        ...

    def trim(self) -> int:
        """Give unused memory back to where it came from. Return how many bytes."""
        ...

    def stats(self) -> PoolStats:
        """Return the counters of this moment."""
        ...


class Region(NamedTuple):
    """A range of host bytes: the address `ptr` and the size `nbytes`."""

    ptr: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.nbytes} bytes at {self.ptr:#x}"


@dataclass(frozen=True, slots=True)
class PoolStats:
    """The state of a `HostPool`: bytes, unless said otherwise.

    The pool holds `reserved` in `slabs` slabs. Of that `used` is allocated now, in sizes rounded up to 4096, and
    `peak` was the most. `largest_free` is the largest request that needs no growth. `failures` counts the requests
    that ended in OutOfHostMemory, `source_calls` the slabs asked of `source`, and `source_failures` its refusals.
    """

    source: str
    capacity: int | None
    reserved: int
    used: int
    peak: int
    largest_free: int
    slabs: int
    failures: int
    source_calls: int
    source_failures: int

    @property
    def fragmentation(self) -> float:
        """The share of the free bytes that no single request can have: 0 if they lie together, or none is free."""
        free = self.reserved - self.used
        return 1 - self.largest_free / free if free else 0.0


class OutOfHostMemory(MemoryError):
    """Host memory could not be had.

    `needed`, `used`, `free`, `largest_free` and `limit` are in bytes; the last three are None where
    they are unknown. A request that can never be met has `needed > limit`; any other may succeed once
    memory is freed.
    """

    def __init__(
        self,
        reason: str,
        advice: str,
        needed: int,
        used: int,
        free: int | None = None,
        largest_free: int | None = None,
        limit: int | None = None,
    ) -> None:
        # All arguments go to `args`, so that the error can be pickled and keeps its attributes.
        super().__init__(reason, advice, needed, used, free, largest_free, limit)
        self.reason = reason
        self.advice = advice
        self.needed = needed
        self.used = used
        self.free = free
        self.largest_free = largest_free
        self.limit = limit

    def __str__(self) -> str:
        numbers = [f"needed {format_bytes(self.needed)}"]
        if self.free is not None:
            numbers.append(f"free {format_bytes(self.free)}")
        if self.largest_free is not None:
            numbers.append(f"largest free {format_bytes(self.largest_free)}")
        numbers.append(f"used {format_bytes(self.used)}")
        numbers.append("no limit set" if self.limit is None else f"limit {format_bytes(self.limit)}")
        return f"{self.reason} ({', '.join(numbers)}). {self.advice}"


def round_up(nbytes: int) -> int:
    """Round a size up to whole units of 4096 bytes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def check_request(owner: object, nbytes: int, closed: bool) -> None:
    """Raise the errors that every `allocate` has in common."""
    if closed:
        raise RuntimeError(f"{type(owner).__name__} is closed: {nbytes} bytes cannot be allocated from it")
    if nbytes <= 0:
        raise ValueError(f"cannot allocate {nbytes} bytes: the size must be positive")


def not_allocated(owner: object, region: Region) -> ValueError:
    """The error for a region that `owner` cannot take back."""
    return ValueError(
        f"{region} are not allocated from this {type(owner).__name__}: "
        "they were freed already, or belong to another memory"
    )


def still_allocated(owner: object, regions: Collection[Region]) -> RuntimeError:
    """The error for closing `owner` while `regions` are allocated."""
    named = ", ".join(str(region) for region in islice(regions, 4))
    more = ", ..." if len(regions) > 4 else ""
    count = "1 region" if len(regions) == 1 else f"{len(regions)} regions"
    total = format_bytes(sum(region.nbytes for region in regions))
    return RuntimeError(
        f"cannot close {type(owner).__name__}: {count} of {total} still allocated "
        f"({named}{more}). Deallocate them first"
    )

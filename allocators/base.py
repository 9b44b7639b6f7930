"""Host memory as every source gives it: the protocol, regions, errors, and an account of regions to build on."""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import astuple, dataclass, replace
from itertools import islice
from typing import Generic, NamedTuple, Protocol, TypeVar

from ..sizes import format_bytes

ALIGNMENT = 4096
_LARGEST = sys.maxsize - (4 << 20)  # leaves room for alignment

Held = TypeVar("Held")


class HostMemory(Protocol):
    """A source of host memory. Every method may be called from any thread.

    Sizes are in bytes. The contents of new memory are undefined. A region is valid until it is
    deallocated, and no longer than the `HostMemory` it came from.
    """

    def allocate(self, nbytes: int) -> Region:
        """Return a region that starts on a 4096-byte boundary.

        Args:
            nbytes: Its size.

        Raises:
            ValueError: `nbytes` is not positive.
            OutOfHostMemory: There is not enough memory.
            RuntimeError: The source is closed.
        """

    def deallocate(self, region: Region) -> None:
        """Take back a region.

        Args:
            region: As `allocate` returned it.

        Raises:
            ValueError: It is unknown here or was freed already.
        """

    def footprint(self, nbytes: int) -> int:
        """Return how much memory a region takes, with what rounding and bookkeeping add.

        Args:
            nbytes: Its size.
        """

    def close(self) -> None:
        """Release everything held. Idempotent.

        Raises:
            RuntimeError: Regions are still allocated. Nothing has changed then.
        """


class HostPool(HostMemory, Protocol):
    """A `HostMemory` that cuts its regions out of larger slabs, and keeps count."""

    def slab(self, region: Region) -> Region:
        """Return the slab that an allocated region lies in.

        Args:
            region: As `allocate` returned it.

        Raises:
            ValueError: It is not allocated here.
        """

    def trim(self) -> int:
        """Give unused memory back to where it came from. Return how many bytes."""

    def stats(self) -> PoolStats:
        """Return the counters of this moment."""


class Region(NamedTuple):
    """A range of host bytes: the address `ptr` and the size `nbytes`."""

    ptr: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.nbytes} bytes at {self.ptr:#x}"


@dataclass(frozen=True, slots=True)
class PoolStats:
    """The state of a `HostPool`: bytes, unless said otherwise.

    Args:
        source: The name of the source of its slabs.
        capacity: The most that it may hold, or None.
        reserved: As much it holds.
        used: Of that, what is allocated now, in sizes rounded up to 4096.
        peak: The most that was.
        largest_free: The largest request that needs no growth.
        slabs: The number of slabs.
        failures: The number of requests that ended in OutOfHostMemory.
        source_calls: The number of slabs asked of the source.
        source_failures: The number of its refusals.
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


@dataclass(eq=False, repr=False)
class OutOfHostMemory(MemoryError):
    """Host memory could not be had.

    A request that can never be met has `needed > limit`; any other may succeed once memory is freed.

    Args:
        reason: Why.
        advice: What helps.
        needed: The bytes that were asked for.
        used: The bytes that are allocated.
        free: The bytes that are free, or None where that is unknown.
        largest_free: The most of them in one piece, or None.
        limit: The most bytes that there may be, or None.
    """

    reason: str
    advice: str
    needed: int
    used: int = 0
    free: int | None = None
    largest_free: int | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        super().__init__(*astuple(self))  # pickling and copying make it anew from these

    def __str__(self) -> str:
        sizes = {"needed": self.needed, "free": self.free, "largest free": self.largest_free, "used": self.used}
        numbers = [f"{name} {format_bytes(size)}" for name, size in sizes.items() if size is not None]
        numbers.append("no limit set" if self.limit is None else f"limit {format_bytes(self.limit)}")
        return f"{self.reason} ({', '.join(numbers)}). {self.advice}"


class DirectMemory(ABC, Generic[Held]):
    """A `HostMemory` that keeps account of its regions. A subclass obtains and gives back a single one.

    `Held` is what the subclass needs to give a region back. The object must outlive its regions, and never frees
    them by itself.
    """

    def __init__(self) -> None:
        self._live: dict[int, tuple[Region, Held]] = {}
        self._used = 0
        self._closed = False
        self._lock = threading.Lock()

    def allocate(self, nbytes: int) -> Region:
        """Return a region that starts on a 4096-byte boundary.

        Args:
            nbytes: Its size.

        Raises:
            ValueError: `nbytes` is not positive.
            OutOfHostMemory: There is not enough memory.
            RuntimeError: The source is closed, or fails as its class says.
        """
        check_request(self, nbytes, self._closed)
        try:
            if nbytes > _LARGEST:  # ctypes would cut it down to 64 bits without a word
                raise OutOfHostMemory("no address range is that large", "Ask for less", nbytes)
            ptr, held = self._obtain(nbytes)
        except OutOfHostMemory as error:
            # Whoever obtains a region does not know of the others.
            raise replace(error, needed=nbytes, used=self._used) from error.__cause__
        region = Region(ptr, nbytes)
        with self._lock:
            self._live[ptr] = region, held
            self._used += nbytes
        return region

    def deallocate(self, region: Region) -> None:
        """Give a region back at once, without waiting for the device.

        Where giving it back fails the region stays allocated, and the call can be repeated.

        Args:
            region: As `allocate` returned it.

        Raises:
            ValueError: It is unknown here or was freed already.
        """
        with self._lock:
            entry = self._live.get(region.ptr)
            if entry is None or entry[0] != region:
                raise not_allocated(self, region)
            self._give_back(region, entry[1])
            del self._live[region.ptr]
            self._used -= region.nbytes

    def footprint(self, nbytes: int) -> int:
        """Return how much memory a region takes: whole pages.

        Args:
            nbytes: Its size.
        """
        return round_up(nbytes)

    def close(self) -> None:
        """Refuse further requests.

        Raises:
            RuntimeError: Regions are still allocated.
        """
        with self._lock:
            if self._live:
                raise still_allocated(self, [region for region, _ in self._live.values()])
            self._closed = True

    @abstractmethod
    def _obtain(self, nbytes: int) -> tuple[int, Held]:
        """Return the address of `nbytes` bytes on a 4096-byte boundary, and what `_give_back` needs.

        Raises OutOfHostMemory, in which `used` need not be right.
        """

    @abstractmethod
    def _give_back(self, region: Region, held: Held) -> None:
        """Give a region back, or raise and leave it as it is. One thread at a time calls this."""


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

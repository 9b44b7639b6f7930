"""A pool that cuts few large slabs into many regions."""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from types import TracebackType

from .base import (
    ALIGNMENT,
    HostMemory,
    OutOfHostMemory,
    PoolStats,
    Region,
    check_request,
    human,
    not_allocated,
    round_up,
    still_allocated,
)

_log = logging.getLogger("tiered_mem.allocators")


class SlabPool:
    """A `HostMemory` that takes slabs of `slab_bytes` from `source` and cuts regions out of them.

    Best fit with coalescing, in units of 4096 bytes. A region never crosses slabs. The pool computes
    with addresses only and never touches the memory. It grows on demand, at most to `capacity` bytes
    (None: no limit; the last slab may be smaller). A request above `slab_bytes` gets a slab of its own.

    Take `slab_bytes` at least four times the largest usual request, or memory is lost at the slabs'
    ends. The source must outlive the pool and is not closed by it.

    Threads may share a pool, but do not deallocate from `__del__` or a weakref callback: these can run
    in the middle of a call to the pool, on the same thread, and would then wait for themselves.
    """

    def __init__(self, source: HostMemory, slab_bytes: int = 1 << 30, capacity: int | None = None) -> None:
        if slab_bytes <= 0:
            raise ValueError(f"slab_bytes must be positive, got {slab_bytes}")
        if capacity is not None and capacity < ALIGNMENT:
            raise ValueError(f"capacity must be at least {ALIGNMENT} bytes, got {capacity}")
        self._source = source
        self._slab_bytes = round_up(slab_bytes)
        self._capacity = None if capacity is None else capacity // ALIGNMENT * ALIGNMENT
        self._slabs: dict[int, _Slab] = {}
        self._next_slab = 0
        self._free: list[tuple[int, int, int]] = []  # (size, slab number, offset), sorted: best fit first
        self._live: dict[int, tuple[Region, _Slab]] = {}
        self._reserved = 0
        self._used = 0
        self._peak = 0
        self._failures = 0
        self._source_calls = 0
        self._closed = False
        # One lock, held while the pool grows as well: a second thread in need of memory would only pin
        # a second slab, where the first one's has room for both.
        self._lock = threading.Lock()

    def allocate(self, nbytes: int, *, resident: bool = False) -> Region:
        """Return a region of `nbytes` bytes on a 4096-byte boundary, growing the pool if need be.

        Raises OutOfHostMemory if the capacity or the source does not allow it, ValueError if `nbytes`
        is not positive, and RuntimeError once closed.
        """
        size = round_up(nbytes)
        with self._lock:
            check_request(self, nbytes, self._closed)
            position = bisect_left(self._free, (size,))
            if position == len(self._free):
                self._grow(size)
                position = bisect_left(self._free, (size,))
            room, number, start = self._free.pop(position)
            slab = self._slabs[number]
            end = start + room
            del slab.free_from[start]
            del slab.free_until[end]
            if room > size:
                self._add_free(slab, start + size, end)
            region = Region(slab.region.ptr + start, nbytes)
            self._live[region.ptr] = region, slab
            self._used += size
            self._peak = max(self._peak, self._used)
            return region

    def deallocate(self, region: Region) -> None:
        """Take back a region. Raises ValueError if it is unknown here or was freed already."""
        with self._lock:
            slab = self._slab_of(region)
            del self._live[region.ptr]
            size = round_up(region.nbytes)
            self._used -= size
            start = region.ptr - slab.region.ptr
            end = start + size
            before = slab.free_until.get(start)
            if before is not None:
                self._remove_free(slab, before, start)
                start = before
            after = slab.free_from.get(end)
            if after is not None:
                self._remove_free(slab, end, after)
                end = after
            self._add_free(slab, start, end)

    def footprint(self, nbytes: int) -> int:
        """Return how much memory a region takes: whole pages."""
        return round_up(nbytes)

    def slab(self, region: Region) -> Region:
        """Return the slab that an allocated region lies in. Raises ValueError if it is not allocated here."""
        with self._lock:
            return self._slab_of(region).region

    def stats(self) -> PoolStats:
        """Return the counters of this moment."""
        with self._lock:
            return PoolStats(
                source=type(self._source).__name__,
                capacity=self._capacity,
                reserved=self._reserved,
                used=self._used,
                peak=self._peak,
                largest_free=self._largest_free(),
                slabs=len(self._slabs),
                failures=self._failures,
                source_calls=self._source_calls,
            )

    def trim(self) -> int:
        """Give wholly empty slabs back to the source and return how many bytes that were.

        An error of the source is passed on; the slabs not yet given back then stay in the pool.
        """
        with self._lock:
            return self._give_back(self._reserved)

    def close(self) -> None:
        """Give all slabs back to the source. Closing again does nothing.

        Raises RuntimeError, and changes nothing, while regions are still allocated: a device may be
        copying to them. An error of the source is passed on, and `close` may then be called again.
        """
        with self._lock:
            if self._live:
                raise still_allocated(self, [region for region, _ in self._live.values()])
            self._give_back(self._reserved)
            self._closed = True

    def __enter__(self) -> SlabPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception as failure:  # the error on its way out matters more
            _log.warning("SlabPool was left open: %s", failure)

    def _slab_of(self, region: Region) -> _Slab:
        known, slab = self._live.get(region.ptr, (None, None))
        if slab is None or known != region:
            raise not_allocated(self, region)
        return slab

    def _add_free(self, slab: _Slab, start: int, end: int) -> None:
        slab.free_from[start] = end
        slab.free_until[end] = start
        insort(self._free, (end - start, slab.number, start))

    def _remove_free(self, slab: _Slab, start: int, end: int) -> None:
        del slab.free_from[start]
        del slab.free_until[end]
        del self._free[bisect_left(self._free, (end - start, slab.number, start))]

    def _largest_free(self) -> int:
        return self._free[-1][0] if self._free else 0

    def _grow(self, size: int) -> None:
        slab_bytes = max(size, self._slab_bytes)
        if self._capacity is not None:
            if size > self._capacity:
                raise self._out_of_memory(
                    f"a request of {human(size)} can never fit into this pool",
                    "Raise the capacity, or split the request",
                    size,
                )
            self._make_room(size, self._capacity)
            slab_bytes = min(slab_bytes, self._capacity - self._reserved)
        self._source_calls += 1
        began = time.perf_counter()
        try:
            region = self._source.allocate(slab_bytes)
        except Exception as error:
            raise self._out_of_memory(
                f"{type(self._source).__name__} did not give a slab of {human(slab_bytes)}: {error}",
                "Free regions, or give the pool less to hold; smaller slabs let it grow in smaller steps",
                size,
            ) from error
        seconds = time.perf_counter() - began
        slab = _Slab(self._next_slab, region)
        self._next_slab += 1
        self._slabs[slab.number] = slab
        self._reserved += slab_bytes
        self._add_free(slab, 0, slab_bytes)
        _log.info(
            "pool grew by %s from %s in %.3f s, to %s in %d slabs",
            human(slab_bytes),
            type(self._source).__name__,
            seconds,
            human(self._reserved),
            len(self._slabs),
        )

    def _make_room(self, size: int, capacity: int) -> None:
        """Let the capacity allow a slab of `size` bytes, by giving back empty slabs that are too small."""
        short = size - (capacity - self._reserved)
        if short <= 0:
            return
        if short > sum(slab.region.nbytes for slab in self._slabs.values() if slab.is_empty()):
            raise self._out_of_memory(
                f"a request of {human(size)} does not fit into the pool now",
                "Free regions and try again, or raise the capacity",
                size,
            )
        self._give_back(short)

    def _give_back(self, wanted: int) -> int:
        """Return empty slabs to the source until they come to `wanted` bytes or none is left."""
        given = 0
        for slab in [slab for slab in self._slabs.values() if slab.is_empty()]:
            if given >= wanted:
                break
            nbytes = slab.region.nbytes
            self._source.deallocate(slab.region)
            self._remove_free(slab, 0, nbytes)
            del self._slabs[slab.number]
            self._reserved -= nbytes
            given += nbytes
        return given

    def _out_of_memory(self, reason: str, advice: str, size: int) -> OutOfHostMemory:
        self._failures += 1
        free = self._reserved - self._used
        largest_free = self._largest_free()
        if self._capacity is not None:
            free = self._capacity - self._used
            largest_free = max(largest_free, self._capacity - self._reserved)
        return OutOfHostMemory(reason, advice, size, self._used, free, largest_free, self._capacity)


@dataclass(slots=True)
class _Slab:
    """A slab and its free ranges as offsets, found by where they begin and by where they end."""

    number: int
    region: Region
    free_from: dict[int, int] = field(default_factory=dict)
    free_until: dict[int, int] = field(default_factory=dict)

    def is_empty(self) -> bool:
        return self.free_from.get(0) == self.region.nbytes

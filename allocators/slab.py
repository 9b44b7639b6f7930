"""A pool that cuts regions out of few large slabs of host memory."""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left, insort
from collections import deque

from ..sizes import format_bytes
from .base import (
    ALIGNMENT,
    HostMemory,
    OutOfHostMemory,
    PoolStats,
    Region,
    check_request,
    not_allocated,
    round_up,
    still_allocated,
)

_log = logging.getLogger("tiered_mem.allocators")

# What is left at a slab's end is lost to large requests, so that a slab has room for a few of the largest.
_REQUESTS_OF_A_SLAB = 8
_SMALLEST_SLAB = 2 << 20
# Of memory that is taken in advance; drivers refuse to pin hundreds of GiB at a time.
_LARGEST_SLAB = 16 << 30
_NO_LIMIT = 1 << 100  # more than any request


class SlabPool:
    """A `HostPool` that takes slabs from `source` and cuts regions out of them.

    The pool takes the best fit and joins free neighbours, in units of 4096 bytes. A call costs the same however
    many regions there are. A region never crosses slabs. The pool computes with addresses only and never touches
    the memory.

    It grows on demand. A new slab holds eight of the largest requests
    so far, but about `slab_bytes` at most: a small pool grows in small steps, a large one in few. A slab holds a
    whole number of the request that it is taken for, since what is left at its end is lost to large requests. A
    source that refuses a slab is asked for smaller ones, or for what it says that it has left.

    Threads may share a pool. `deallocate` may be called from `__del__` and from weakref callbacks, which can run in
    the middle of another call to the pool, on the same thread.

    Args:
        source: Gives the slabs. It must outlive the pool, which does not close it.
        slab_bytes: About the largest size of a slab.
        capacity: The most bytes in all. None is no limit.

    Raises:
        ValueError: slab_bytes is not positive, or capacity is below 4096 bytes.
    """

    def __init__(self, source: HostMemory, slab_bytes: int = 1 << 30, capacity: int | None = None) -> None:
        if slab_bytes <= 0:
            raise ValueError(f"slab_bytes must be positive, got {slab_bytes}")
        if capacity is not None and capacity < ALIGNMENT:
            raise ValueError(f"capacity must be at least {ALIGNMENT} bytes, got {capacity}")
        self._source = source
        self._name: str = getattr(source, "name", type(source).__name__)
        self._slab_bytes = round_up(slab_bytes)
        self._asked = capacity
        self._limit = _NO_LIMIT if capacity is None else capacity // ALIGNMENT * ALIGNMENT
        self._slabs: dict[int, Region] = {}  # by address
        self._round = 0
        self._cut_in: dict[int, int] = {}  # by a slab's address: the last round in which something was cut from it
        self._free = FreeRanges()
        self._live: dict[int, tuple[Region, Region]] = {}  # by address: a region and its slab
        self._used = self._peak = self._largest = 0
        self._failures = self._source_calls = self._source_failures = 0
        self._closed = False
        # One lock, held while the pool grows as well: a second thread in need of memory would only pin
        # a second slab, where the first one's has room for both. A thread that comes in again, from a `__del__`,
        # brings regions back; they wait for the next call, as all do.
        self._lock = threading.RLock()
        self._back: deque[tuple[Region, Region]] = deque()  # regions and their slabs

    def allocate(self, nbytes: int) -> Region:
        """Return a region on a 4096-byte boundary, growing the pool if need be.

        Args:
            nbytes: Its size.

        Raises:
            OutOfHostMemory: The capacity or the source does not allow it.
            ValueError: `nbytes` is not positive.
            RuntimeError: The pool is closed.
        """
        with self._lock:
            self._merge_back()
            check_request(self, nbytes, self._closed)
            size = round_up(nbytes)
            self._largest = max(self._largest, size)
            try:
                start, room, slab = self._free.take_smallest(size) or self._grow(size)
            except OutOfHostMemory:
                self._failures += 1
                raise
            if room > size:
                self._free.add(start + size, room - size, slab)
            region = Region(start, nbytes)
            self._live[start] = region, slab
            self._cut_in[slab.ptr] = self._round
            self._used += size
            self._peak = max(self._peak, self._used)
            return region

    def deallocate(self, region: Region) -> None:
        """Take back a region.

        Args:
            region: As `allocate` returned it.

        Raises:
            ValueError: It is unknown here or was freed already.
        """
        with self._lock:
            slab = self.slab(region)
            del self._live[region.ptr]
            self._back.append((region, slab))

    def footprint(self, nbytes: int) -> int:
        """Return how much memory a region takes: whole pages.

        Args:
            nbytes: Its size.
        """
        return round_up(nbytes)

    def preallocate(self, nbytes: int) -> None:
        """Reserve memory now, so that no step has to wait for a slab. The slabs are of up to 16 GiB.

        It is under 4096 bytes less if the capacity is not whole units, and up to a 16th of `slab_bytes` less if the
        capacity is short and the source rounds up.

        Args:
            nbytes: As much in all.

        Raises:
            ValueError: It is above the capacity.
            OutOfHostMemory: The source gives less. What it gave is kept.
        """
        with self._lock:
            self._merge_back()
            check_request(self, nbytes, self._closed)
            if self._asked is not None and nbytes > self._asked:
                raise ValueError(
                    f"cannot preallocate {format_bytes(nbytes)} in a pool of at most {format_bytes(self._asked)}"
                )
            began = time.perf_counter()
            while (short := min(round_up(nbytes), self._limit) - self._reserved) > 0:
                wanted = min(_LARGEST_SLAB, short)
                least = min(wanted, round_up(self._slab_bytes // 16))
                if self._source.footprint(least) > self._left:
                    break
                self._add_slab(wanted, least)
            self._log_growth("pool has", self._reserved, began)

    def slab(self, region: Region) -> Region:
        """Return the slab that an allocated region lies in.

        Args:
            region: As `allocate` returned it.

        Raises:
            ValueError: It is not allocated here.
        """
        known, slab = self._live.get(region.ptr, (None, None))
        if slab is None or known != region:
            raise not_allocated(self, region)
        return slab

    def stats(self) -> PoolStats:
        """Return the counters of this moment."""
        with self._lock:
            self._merge_back()
            return PoolStats(
                source=self._name,
                capacity=None if self._asked is None else self._limit,
                reserved=self._reserved,
                used=self._used,
                peak=self._peak,
                largest_free=self._free.largest(),
                slabs=len(self._slabs),
                failures=self._failures,
                source_calls=self._source_calls,
                source_failures=self._source_failures,
            )

    @property
    def closed(self) -> bool:
        return self._closed

    def begin_round(self) -> None:
        """Begin another round, such as a step of a training: see `trim`."""
        self._round += 1

    def trim(self, nbytes: int | None = None, *, unused_for: int = 0) -> int:
        """Give empty slabs back to the source and return how many bytes.

        An error of the source is passed on; the slabs not yet given back then stay in the pool.

        Args:
            nbytes: About as many are enough. None is all.
            unused_for: Only slabs that no region was cut from in so many rounds.
        """
        with self._lock:
            self._merge_back()
            return self._free_slabs(self._reserved if nbytes is None else nbytes, unused_for)

    def close(self) -> None:
        """Give all slabs back to the source. Idempotent.

        An error of the source is passed on, and `close` may then be called again.

        Raises:
            RuntimeError: Regions are still allocated: a device may be copying to them. Nothing has changed then.
        """
        with self._lock:
            if self._live:
                raise still_allocated(self, [region for region, _ in list(self._live.values())])
            self._merge_back()
            self._free_slabs(self._reserved)
            self._closed = True

    def __enter__(self) -> SlabPool:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            _log.warning("SlabPool was left open: %s", str(failure))  # the error on its way out matters more

    @property
    def _reserved(self) -> int:
        return sum(slab.nbytes for slab in self._slabs.values())

    @property
    def _left(self) -> int:
        """The bytes that the capacity leaves for new slabs."""
        return self._limit - self._reserved

    def _merge_back(self) -> None:
        """Adds to the free ranges what was brought back since the last call."""
        while self._back:
            region, slab = self._back.popleft()
            size = round_up(region.nbytes)
            self._used -= size
            self._free.merge(region.ptr, size, slab)

    def _grow(self, size: int) -> tuple[int, int, Region]:
        """A new slab with room for `size` bytes, taken as a free range."""
        self._make_room(size)
        began = time.perf_counter()
        try:
            slab = self._add_slab(self._step(size), size)
        except OutOfHostMemory as error:
            # What the source lacks may lie here, in slabs that are each too small.
            free = error.__cause__.free if isinstance(error.__cause__, OutOfHostMemory) else None
            short = self._source.footprint(size) - (free or 0)
            if short > sum(slab.nbytes for slab in self._empty()):
                raise
            self._give_back(short, size)
            slab = self._add_slab(size, size)
        self._log_growth("pool grew by", slab.nbytes, began)
        return self._free.take(slab.ptr)

    def _step(self, size: int) -> int:
        """The size of a slab for a pool that needs room for `size`: as near to whole such requests as may be."""
        several = max(_SMALLEST_SLAB, _REQUESTS_OF_A_SLAB * self._largest)
        wanted = max(size, min(self._slab_bytes, several))
        whole = round(wanted / size) * size
        return whole if self._source.footprint(whole) == whole else wanted

    def _within_capacity(self, wanted: int, least: int) -> int:
        """As much of `wanted` as the capacity leaves for a slab. It leaves at least `least`."""
        while wanted > least and self._source.footprint(wanted) > self._left:
            # A source that rounds up may have to be asked for less than what is left.
            wanted = max(least, self._left if wanted > self._left else wanted // 2 // ALIGNMENT * ALIGNMENT)
        return wanted

    def _add_slab(self, wanted: int, least: int) -> Region:
        """A new slab of `wanted` bytes, or of half as often as the source refuses, down to `least`."""
        while True:
            nbytes = self._source.footprint(self._within_capacity(wanted, least))
            self._source_calls += 1
            try:
                slab = self._source.allocate(nbytes)
                break
            except Exception as error:
                self._source_failures += 1
                reason = f"{self._name} did not give a slab of {format_bytes(nbytes)}: {error}"
                if wanted == least or not isinstance(error, OutOfHostMemory):
                    advice = (
                        "Free regions, or give the pool less to hold; smaller slabs let it grow in smaller steps"
                    )
                    raise self._out_of_memory(reason, advice, least) from error
                # A source that says what it has left is asked for that.
                left = wanted if error.free is None else error.free // ALIGNMENT * ALIGNMENT
                wanted = max(least, left if left < wanted else round_up(wanted // 2))
                # A source that is dry stays so, and says it at each growth.
                level = logging.WARNING if self._source_failures == 1 else logging.DEBUG
                _log.log(level, "%s. Trying %s. Later refusals are only counted", reason, format_bytes(wanted))
        self._slabs[slab.ptr] = slab
        self._cut_in[slab.ptr] = self._round
        self._free.add(slab.ptr, nbytes, slab)
        return slab

    def _log_growth(self, what: str, nbytes: int, began: float) -> None:
        seconds, source = time.perf_counter() - began, self._name
        size, now = format_bytes(nbytes), format_bytes(self._reserved)
        _log.info("%s %s from %s in %.3f s, to %s in %d slabs", what, size, source, seconds, now, len(self._slabs))

    def _make_room(self, size: int) -> None:
        """Give back empty slabs until the capacity allows one of `size` bytes."""
        needed = self._source.footprint(size)
        if needed > self._limit:
            reason = f"a request of {format_bytes(size)} can never fit into this pool"
            raise self._out_of_memory(reason, "Raise the capacity, or split the request", size)
        short = needed - self._left
        if short > sum(slab.nbytes for slab in self._empty()):
            reason = f"a request of {format_bytes(size)} does not fit into the pool now"
            raise self._out_of_memory(reason, "Free regions and try again, or raise the capacity", size)
        self._give_back(short, size)

    def _give_back(self, short: int, size: int) -> None:
        """Return empty slabs to the source, as a request of `size` is `short` of so many bytes."""
        try:
            self._free_slabs(short)
        except Exception as error:
            reason = f"{self._name} did not take back an empty slab: {error}"
            advice = "The slab stays in the pool; free regions and try again"
            raise self._out_of_memory(reason, advice, size) from error

    def _free_slabs(self, wanted: int, unused_for: int = 0) -> int:
        """Return empty slabs to the source until they come to `wanted` bytes or none is left."""
        given = 0
        for slab in self._empty():
            if given >= wanted:
                break
            if self._round - self._cut_in[slab.ptr] < unused_for:
                continue
            self._source.deallocate(slab)
            self._free.take(slab.ptr)
            del self._slabs[slab.ptr], self._cut_in[slab.ptr]
            given += slab.nbytes
        return given

    def _empty(self) -> list[Region]:
        return [slab for slab in self._slabs.values() if self._free.covers(slab)]

    def _out_of_memory(self, reason: str, advice: str, size: int) -> OutOfHostMemory:
        free, largest = self._reserved - self._used, self._free.largest()
        if self._asked is None:
            return OutOfHostMemory(reason, advice, size, self._used, free, largest)
        largest = max(largest, self._left)
        return OutOfHostMemory(reason, advice, size, self._used, free + self._left, largest, self._limit)


class FreeRanges:
    """Ranges of addresses in whole units of 4096 bytes. Two ranges of one slab never touch.

    A range is found by its start, its end or its size, in a time that hardly depends on how many there are: ranges
    of all different sizes are at most 23,000 in 1 TiB. A slab is a region of the pool's source.
    """

    __slots__ = ("_begin_at", "_end_at", "_of_size", "_sizes")

    def __init__(self) -> None:
        self._begin_at: dict[int, tuple[int, Region]] = {}  # start: size and slab
        self._end_at: dict[int, int] = {}  # end: start
        self._of_size: dict[int, dict[int, None]] = {}  # size: starts
        self._sizes: list[int] = []  # the different ones, from the smallest on

    def largest(self) -> int:
        """The size of the largest range; 0 if there is none."""
        return self._sizes[-1] if self._sizes else 0

    def covers(self, slab: Region) -> bool:
        """Whether the whole slab is free."""
        found = self._begin_at.get(slab.ptr)
        return found is not None and found[0] == slab.nbytes

    def add(self, start: int, size: int, slab: Region) -> None:
        """Adds a range that touches no other one of its slab."""
        self._begin_at[start] = size, slab
        self._end_at[start + size] = start
        starts = self._of_size.setdefault(size, {})
        if not starts:
            insort(self._sizes, size)
        starts[start] = None

    def take(self, start: int) -> tuple[int, int, Region]:
        """Removes the range that begins at `start`. Returns its start, size and slab."""
        size, slab = self._begin_at.pop(start)
        del self._end_at[start + size]
        starts = self._of_size[size]
        del starts[start]
        if not starts:
            del self._of_size[size]
            del self._sizes[bisect_left(self._sizes, size)]
        return start, size, slab

    def take_smallest(self, size: int) -> tuple[int, int, Region] | None:
        """Removes the smallest range of at least `size` bytes, the newest of several. None if there is none."""
        place = bisect_left(self._sizes, size)
        if place == len(self._sizes):
            return None
        found = self._sizes[place]
        starts = self._of_size[found]
        start, _ = starts.popitem()
        if not starts:
            del self._of_size[found]
            del self._sizes[place]
        del self._end_at[start + found]
        return start, *self._begin_at.pop(start)

    def merge(self, start: int, size: int, slab: Region) -> None:
        """Adds a range, joined with the ranges of its slab that it touches."""
        end = start + size
        if start != slab.ptr:
            before = self._end_at.get(start)
            if before is not None:
                start = before
                self.take(before)
        if end != slab.ptr + slab.nbytes and end in self._begin_at:
            _, after, _ = self.take(end)
            end += after
        self.add(start, end - start, slab)

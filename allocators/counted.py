"""Counts what is asked of a source of host memory."""

from __future__ import annotations

import time
from dataclasses import dataclass

from .adaptor import Adaptor
from .base import HostMemory, Region


class CountedMemory(Adaptor):
    """A `HostMemory` that keeps count of what `source` is asked.

    The source must outlive it, and is not closed by it.
    """

    def __init__(self, source: HostMemory) -> None:
        super().__init__(source)
        self._nbytes = _Counter()
        self._regions = _Counter()
        self._failures = 0
        self._seconds = 0.0

    def counts(self) -> MemoryCounts:
        """Return the counts of this moment."""
        with self._lock:
            return MemoryCounts(self._nbytes.count(), self._regions.count(), self._failures, self._seconds)

    def _take(self, nbytes: int) -> Region:
        region = None
        began = time.perf_counter()
        try:
            region = self._source.allocate(nbytes)
            return region
        finally:
            seconds = time.perf_counter() - began
            with self._lock:
                self._seconds += seconds
                if region is None:
                    self._failures += 1
                else:
                    self._nbytes.add(self.footprint(nbytes))
                    self._regions.add(1)

    def _give_back(self, region: Region) -> None:
        began = time.perf_counter()
        try:
            self._source.deallocate(region)
        finally:
            seconds = time.perf_counter() - began
            self._seconds += seconds
        freed = self.footprint(region.nbytes)
        self._nbytes.current -= freed
        self._regions.current -= 1


@dataclass(frozen=True, slots=True)
class Count:
    """How many there are now, were at most, and have been in all."""

    current: int = 0
    peak: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class MemoryCounts:
    """What a source was asked: bytes, counted as `footprint` says, and regions.

    `failures` counts the requests that ended in an error. `seconds` were spent in the source, by all threads
    together.
    """

    nbytes: Count
    regions: Count
    failures: int
    seconds: float


@dataclass(slots=True)
class _Counter:
    current: int = 0
    peak: int = 0
    total: int = 0

    def add(self, amount: int) -> None:
        current = self.current + amount
        self.current = current
        self.total += amount
        self.peak = max(self.peak, current)

    def count(self) -> Count:
        return Count(self.current, self.peak, self.total)

"""What the adaptors have in common: each puts something before a source, and knows which regions are its own."""

from __future__ import annotations

import threading

from .base import HostMemory, Region, check_request, not_allocated, still_allocated


class Adaptor:
    """A `HostMemory` that hands on to `source` what it is asked.

    The source must outlive it, and is not closed by it. Requests reach the source without a lock held here: they
    may take long, or run code of the user's that gives regions back. Regions may be given back from `__del__` and
    from weakref callbacks, if the source allows that.
    """

    def __init__(self, source: HostMemory) -> None:
        self._source = source
        self._live: dict[int, Region] = {}
        self._closed = False
        # A thread that is inside may come in again, from a `__del__`, to give back another region.
        self._lock = threading.RLock()

    def allocate(self, nbytes: int) -> Region:
        """Return a region of the source. See `HostMemory.allocate` for the errors."""
        check_request(self, nbytes, self._closed)
        region = self._take(nbytes)
        with self._lock:
            self._live[region.ptr] = region
        return region

    def deallocate(self, region: Region) -> None:
        """Give a region back to the source; it stays allocated if the source fails to take it.

        Raises ValueError if the region is unknown here or was freed already.
        """
        with self._lock:
            self._check_allocated(region)
            self._give_back(region)
            del self._live[region.ptr]

    def footprint(self, nbytes: int) -> int:
        """Return how much memory a region takes in the source."""
        return self._source.footprint(nbytes)

    def close(self) -> None:
        """Refuse further requests. Raises RuntimeError while regions are still allocated."""
        with self._lock:
            if self._live:
                raise still_allocated(self, list(self._live.values()))
            self._closed = True

    def _take(self, nbytes: int) -> Region:
        return self._source.allocate(nbytes)

    def _give_back(self, region: Region) -> None:
        """Called under the lock."""
        self._source.deallocate(region)

    def _check_allocated(self, region: Region) -> None:
        if self._live.get(region.ptr) != region:
            raise not_allocated(self, region)

"""A hard limit on how much host memory is taken."""

from __future__ import annotations

from .adaptor import Adaptor
from .base import HostMemory, OutOfHostMemory, Region, human


class LimitedMemory(Adaptor):
    """A `HostMemory` that takes at most `limit_bytes` bytes from `source`, counted as the source takes them.

    That is their `footprint`: what a source rounds up to is locked as well. The source must outlive the limit,
    and is not closed by it. Raises ValueError for a limit that is not positive.
    """

    def __init__(self, source: HostMemory, limit_bytes: int) -> None:
        if limit_bytes <= 0:
            raise ValueError(f"limit_bytes must be positive, got {limit_bytes}")
        super().__init__(source)
        self._limit = limit_bytes
        self._used = 0

    def _take(self, nbytes: int) -> Region:
        needed = self.footprint(nbytes)
        # Taken off before the source is asked, so that two threads never get the last bytes both.
        with self._lock:
            if needed > self._limit - self._used:
                raise self._refusal(needed)
            self._used += needed
        try:
            return self._source.allocate(nbytes)
        except BaseException:
            with self._lock:
                self._used -= needed
            raise

    def _give_back(self, region: Region) -> None:
        self._source.deallocate(region)
        freed = self.footprint(region.nbytes)
        self._used -= freed

    def _refusal(self, needed: int) -> OutOfHostMemory:
        if needed > self._limit:
            reason = f"a request that takes {human(needed)} can never be met within this limit"
            advice = "Raise limit_bytes, or ask for less at a time, such as for smaller slabs"
        else:
            reason = f"a request that takes {human(needed)} would exceed the limit on host memory"
            advice = "Free regions and try again, or raise limit_bytes"
        return OutOfHostMemory(reason, advice, needed, self._used, self._limit - self._used, limit=self._limit)

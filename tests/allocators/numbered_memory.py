"""A `HostMemory` of bare addresses, for what only computes with them."""

from __future__ import annotations

from tiered_mem.allocators import Region
from tiered_mem.allocators.base import OutOfHostMemory


class NumberedMemory:
    """Hands out addresses that nothing lies behind, each range right after the one before.

    Neighbouring ranges would show a pool that merges across slabs. `refuse` makes it run dry, as do more than
    `limit` bytes.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self.live: set[Region] = set()
        self.refuse: Exception | None = None
        self.refuse_back: Exception | None = None
        self._next = 1 << 40

    def allocate(self, nbytes: int) -> Region:
        if self.refuse is not None:
            raise self.refuse
        used = sum(each.nbytes for each in self.live)
        if self._limit is not None and used + nbytes > self._limit:
            raise OutOfHostMemory("dry", "Wait", nbytes, used, limit=self._limit)
        region = Region(self._next, nbytes)
        self._next += nbytes
        self.live.add(region)
        return region

    def deallocate(self, region: Region) -> None:
        if self.refuse_back is not None:
            raise self.refuse_back
        self.live.remove(region)

    def footprint(self, nbytes: int) -> int:
        return nbytes

    def close(self) -> None:
        if self.live:
            raise RuntimeError(f"{len(self.live)} regions were not returned")

"""The common part of sources that get each region by itself."""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from .base import OutOfHostMemory, Region, check_request, not_allocated, round_up, still_allocated

Held = TypeVar("Held")

_LARGEST = sys.maxsize - (4 << 20)  # leaves room for alignment


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
        """See `HostMemory.allocate` and the class."""
        check_request(self, nbytes, self._closed)
        try:
            if nbytes > _LARGEST:  # ctypes would cut it down to 64 bits without a word
                raise OutOfHostMemory("no address range is that large", "Ask for less", nbytes, used=0)
            ptr, held = self._obtain(nbytes)
        except OutOfHostMemory as error:
            # Whoever obtains a region does not know of the others.
            raise OutOfHostMemory(
                error.reason, error.advice, nbytes, self._used, limit=error.limit
            ) from error.__cause__
        region = Region(ptr, nbytes)
        with self._lock:
            self._live[ptr] = region, held
            self._used += nbytes
        return region

    def deallocate(self, region: Region) -> None:
        """Give a region back at once, without waiting for the device.

        Raises ValueError if the region is unknown here or was freed already. Where giving it back fails
        the region stays allocated, and the call can be repeated.
        """
        with self._lock:
            entry = self._live.get(region.ptr)
            if entry is None or entry[0] != region:
                raise not_allocated(self, region)
            self._give_back(region, entry[1])
            del self._live[region.ptr]
            self._used -= region.nbytes

    def footprint(self, nbytes: int) -> int:
        """Return how much memory a region takes: whole pages."""
        return round_up(nbytes)

    def close(self) -> None:
        """Refuse further requests. Raises RuntimeError while regions are still allocated."""
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

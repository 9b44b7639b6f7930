"""Ordinary memory from the operating system."""

from __future__ import annotations

import ctypes
import mmap
import threading

from .base import OutOfHostMemory, Region, check_request, not_allocated, round_up, still_allocated


class PageableMemory:
    """A `HostMemory` of anonymous private mappings, one for each region.

    The memory is not pinned: devices copy to and from it synchronously. It is zeroed, and takes up
    RAM as it is first written.
    """

    def __init__(self) -> None:
        self._live: dict[int, tuple[Region, mmap.mmap]] = {}
        self._used = 0
        self._closed = False
        self._lock = threading.Lock()

    def allocate(self, nbytes: int) -> Region:
        """Map `nbytes` bytes, on a 4096-byte boundary. See `HostMemory.allocate` for the errors."""
        check_request(self, nbytes, self._closed)
        try:
            mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, MemoryError) as error:
            raise OutOfHostMemory(
                f"the operating system refused to map memory: {error}",
                "Ask for less, or check the limits of this process: ulimit -v, the overcommit settings, "
                "and vm.max_map_count where there are very many regions",
                needed=nbytes,
                used=self._used,
            ) from error
        region = Region(ctypes.addressof(ctypes.c_char.from_buffer(mapping)), nbytes)
        with self._lock:
            self._live[region.ptr] = region, mapping
            self._used += nbytes
        return region

    def deallocate(self, region: Region) -> None:
        """Unmap a region. Raises ValueError if it is unknown here or was freed already."""
        with self._lock:
            known, mapping = self._live.get(region.ptr, (None, None))
            if mapping is None or known != region:
                raise not_allocated(self, region)
            mapping.close()
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

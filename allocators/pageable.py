"""Ordinary memory, and memory that stays in RAM."""

from __future__ import annotations

import resource

from .base import OutOfHostMemory, Region
from .pages import PageMemory, Pages


class PageableMemory(PageMemory[Pages]):
    """A `HostMemory` of ordinary pages. See `PageMemory` for `numa_node`.

    The memory is not pinned, so that devices copy to and from it synchronously. It is zeroed, and takes up RAM when
    it is first written.
    """

    def _obtain(self, nbytes: int) -> tuple[int, Pages]:
        pages = self._map(nbytes)
        return pages.ptr, pages

    def _give_back(self, region: Region, held: Pages) -> None:
        held.unmap()


class LockedMemory(PageableMemory):
    """A `HostMemory` of pages that are in RAM from the start, and stay there.

    Devices do not know that, so copies are those of pageable memory without the page faults. The process must be
    allowed to lock as much; otherwise a request raises OutOfHostMemory.
    """

    def _obtain(self, nbytes: int) -> tuple[int, Pages]:
        pages = self._map(nbytes)
        try:
            pages.touch()
            pages.lock()
        except OSError as error:
            pages.unmap()
            soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            raise OutOfHostMemory(
                str(error.strerror),
                "Raise it with ulimit -l, for a container with --ulimit memlock=-1, or give the process "
                "CAP_IPC_LOCK; PageableMemory locks nothing",
                needed=nbytes,
                used=0,
                limit=None if soft == resource.RLIM_INFINITY else soft,
            ) from error
        except BaseException:
            pages.unmap()
            raise
        return pages.ptr, pages

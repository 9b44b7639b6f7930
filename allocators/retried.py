"""A second chance for requests that find no host memory."""

from __future__ import annotations

from collections.abc import Callable

from .adaptor import Adaptor
from .base import HostMemory, OutOfHostMemory, Region


class RetriedMemory(Adaptor):
    """A `HostMemory` that has memory freed when `source` runs out, and asks it again.

    on_failure: is called with the bytes that were asked for. It frees something and returns True, or returns
        False if there is nothing left to free. It runs on the thread that needs the memory, without a lock held
        here, so that it may give back regions of this very memory. Under a pool it may not call that pool, which
        waits for its source.

    A request that can never be met is not tried again. The source must outlive it, and is not closed by it.
    """

    def __init__(self, source: HostMemory, on_failure: Callable[[int], bool]) -> None:
        super().__init__(source)
        self._on_failure = on_failure

    def _take(self, nbytes: int) -> Region:
        while True:
            try:
                return self._source.allocate(nbytes)
            except OutOfHostMemory as error:
                never = error.limit is not None and error.needed > error.limit
                if never or not self._on_failure(nbytes):
                    raise

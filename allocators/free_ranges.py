"""The free ranges of a pool's slabs."""

from __future__ import annotations

from bisect import bisect_left, insort

from .base import Region


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

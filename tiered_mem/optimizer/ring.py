"""Ranges of a ring of bytes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


class Ring(Generic[T]):
    """Hands out ranges of `nbytes` bytes, round and round.

    A range is in use until its `leave` says what to wait for. From then on it may be handed out again, to one who
    waits. Ranges are filled in the order in which they are taken: what one has waited for, no later one has to.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._ranges: deque[Range[T]] = deque()
        self._next = 0

    def take(self, nbytes: int) -> Range[T] | None:
        """The next range; None as long as one that it would overlap is in use.

        Raises ValueError for more bytes than the ring has.
        """
        if nbytes > self.nbytes:
            raise ValueError(f"{nbytes} bytes of a ring of {self.nbytes}")
        start = self._next if self._next + nbytes <= self.nbytes else 0
        new: Range[T] = Range(start, start + nbytes)
        before = [other for other in self._ranges if other.start < new.end and new.start < other.end]
        for other in before:
            if not other.left:
                return None
        for other in before:
            new.after += other.waits
            self._ranges.remove(other)
        self._ranges.append(new)
        self._next = new.end
        return new

    def waits(self) -> list[T]:
        """What has to be waited for before the whole ring is anybody else's."""
        return [wait for each in self._ranges for wait in each.waits]


@dataclass(slots=True, eq=False)
class Range(Generic[T]):
    """Bytes of a ring. after: what to wait for before they are used."""

    start: int
    end: int
    after: list[T] = field(default_factory=list)
    waits: list[T] = field(default_factory=list)
    left: bool = False

    def leave(self, waits: list[T]) -> None:
        """They are free for whoever waits for this."""
        self.waits = waits
        self.left = True

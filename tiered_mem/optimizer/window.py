"""The device memory that buckets pass through in a step: a ring, whose ranges are used again and again."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import torch

from ..device.device import Device, Stream
from ..device.transfer import Ticket
from ..tiers.host_tier import HostSlot

T = TypeVar("T")


class Passing(Protocol):
    """What passes through. See `Bucket`."""

    def drop_flat(self) -> None: ...


class Resting(Protocol):
    """Where its bytes rest. See `Residence`."""

    def leave(self, filled: Ticket | None, read: Ticket | None = None) -> None: ...


B = TypeVar("B", bound=Passing)


class Window(Generic[B]):
    """Device memory that buckets pass through, and those that are in it.

    allocated: whoever had the memory before is still at work until then.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self.stream = device.current_stream()
        self.flat = device.empty(nbytes, torch.uint8)
        self.ring: Ring[Ticket] = Ring(nbytes)
        self.allocated = Ticket(self.stream.record_event(), device)
        self.slots: dict[B, Slot] = {}
        self._came: list[Ticket] = []  # of what was dropped

    def keep_only(self, buckets: Sequence[B]) -> None:
        """What came for nothing leaves its place."""
        for bucket in [bucket for bucket in self.slots if bucket not in buckets]:
            self.drop(bucket)

    def empty(self, *, left: bool) -> list[Ticket]:
        """Nothing is in it any more. Returns the copies of what came for nothing; and of all, with `left`."""
        for bucket in list(self.slots):
            self.drop(bucket)
        return self.ring.waits() if left else self._came

    def give_back(self, stream: Stream) -> None:
        """`stream` was the last to use it, and has waited for what has to end before its memory is others'."""
        if stream.stream_id != self.stream.stream_id:
            # It goes back to the stream on which it was allocated.
            self.stream.wait_event(stream.record_event())

    def drop(self, bucket: B) -> None:
        slot = self.slots.pop(bucket)
        bucket.drop_flat()
        slot.residence.leave(None, slot.came)
        if slot.came is not None:
            self._came.append(slot.came)
        if slot.place is not None:
            slot.place.leave(slot.place.after if slot.came is None else [slot.came])


@dataclass(slots=True, eq=False)
class Slot:
    """A bucket's place in the window, and its bytes on the host. came: the copy between the two.

    place: None where the bucket has memory of its own.
    """

    place: Range[Ticket] | None
    residence: Resting
    host: HostSlot
    came: Ticket | None = None


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

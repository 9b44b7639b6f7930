"""Brings buckets to the device, has them stepped, and takes them back, all at the same time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from ..device.device import Device, Stream
from ..device.transfer import Ticket, TransferEngine
from ..tiers.host_tier import HostSlot
from ..tiers.shelf import Exclusive
from .bucket import Bucket, Residence, fetch_ahead
from .layout import Param, Splitter

T = TypeVar("T")


class Pipeline:
    """The buckets of one optimizer on their way through the device, in one step after the other.

    While one is stepped on the compute stream the next one comes, and the one before leaves, on a stream of its own
    each. The host waits for none of this. They pass through a window of device memory, a ring, which is there
    during a step only: it is allocated on the compute stream, which at the end waits for the last copy.

    exclusive: inside, the engine may be called.
    """

    def __init__(self, device: Device, engine: TransferEngine, exclusive: Exclusive, split: Splitter) -> None:
        self._device = device
        self._split = split
        self._engine = engine
        self._exclusive = exclusive
        self._window: _Window | None = None

    def run(
        self,
        buckets: Sequence[Bucket],
        changing: Mapping[Bucket, Set[Param]],
        step: Callable[[Bucket], bool],
        replace: Callable[[Bucket], None],
        window_bytes: int,
    ) -> None:
        """Steps the buckets in order.

        changing: the parameters of each bucket whose states the step needs and changes. step: does it, and says
        whether the states still fit their bucket. replace: finds another place for those that do not.
        window_bytes: the device memory for what comes from the residences.

        Raises what `step`, `replace` and the residences raise, and torch.OutOfMemoryError.
        """
        try:
            if self._window is not None:
                self._window.keep_only([bucket for bucket in buckets if changing[bucket]])
            for index, bucket in enumerate(buckets):
                self._settle(bucket)
                self._bring(bucket, changing[bucket], window_bytes)
                if bucket.away(changing[bucket]):
                    raise RuntimeError("a bucket found no place in the window, though all before it have left")
                following = buckets[index + 1 :]
                fetch_ahead(following, changing)
                if following and (after := following[0].residence) is not None and after.ready:
                    # Some optimizers make the host wait in the middle of a step.
                    self._bring(following[0], changing[following[0]], window_bytes)
                self._one(bucket, changing[bucket], step, replace)
        finally:
            self.drop()

    def prefetch(self, bucket: Bucket, window_bytes: int) -> None:
        """Begins to bring the first bucket of the step to come. Where that would take a wait, only to the host."""
        if bucket.residence is None or self._window is not None:
            return
        if not bucket.residence.ready:
            bucket.residence.fetch()
            return
        self._bring(bucket, set(bucket.params), window_bytes)

    def offload(self, bucket: Bucket, stream: Stream) -> tuple[Ticket, object] | None:
        """Begins to copy to its residence what of a bucket is on the device, outside of a step.

        Returns the copy, and what has to live until it has ended; None where there is nothing to copy.
        """
        residence = bucket.residence
        if residence is None or not bucket.here():
            return None
        host = residence.take(blank=not bucket.away())
        copied = None
        try:
            leaving = bucket.leave(host, set(bucket.params), self._split)
            with self._exclusive:
                copied = self._engine.offload(leaving[0], leaving[1], [stream])
        finally:
            residence.leave(copied)
        return copied, leaving

    def reload(self, buckets: Sequence[Bucket]) -> None:
        """Copies to the device what is away, outside of a step. All or nothing: raises torch.OutOfMemoryError."""
        stream = self._device.current_stream()
        away = [bucket for bucket in buckets if bucket.away()]
        flats = [self._device.empty(bucket.nbytes, torch.uint8) for bucket in away]
        for index, (bucket, flat) in enumerate(zip(away, flats, strict=True), start=1):
            if (residence := bucket.residence) is None:
                continue
            fetch_ahead(away[index:])
            host = residence.take(blank=False)
            came = None
            try:
                with self._exclusive:
                    (came,) = self._engine.reload([host.tensor], [flat], stream, [residence.ticket])
            finally:
                residence.leave(None, came)
            came.hold(stream)
            bucket.arrive(bucket.params, flat)

    def drop(self) -> None:
        """Whatever is still in the window is left as it was when it came, and the window's memory is freed."""
        window, self._window = self._window, None
        if window is not None:
            window.close(self._device.current_stream())

    def _settle(self, bucket: Bucket) -> None:
        """Brings a bucket that is to stay, into memory of its own. Without room for it, it does not stay."""
        if bucket.stays and bucket.away():
            try:
                self.reload([bucket])
            except torch.OutOfMemoryError:
                bucket.stays = False

    def _bring(self, bucket: Bucket, params: Set[Param], window_bytes: int) -> None:
        runs = bucket.runs(params)
        residence = bucket.residence
        if (
            not runs
            or residence is None
            or bucket.stays
            or (self._window is not None and bucket in self._window.slots)
        ):
            return
        window = self._window
        if window is None:
            window = self._window = _Window(self._device, window_bytes)
        place = window.ring.take(bucket.nbytes)
        if place is None:
            return  # it would overlap the bucket that is to be stepped first
        try:
            host = residence.take(blank=False)
        except BaseException:
            place.leave(place.after)
            raise
        slot = window.slots[bucket] = _Slot(place, residence, host)
        flat = window.flat[place.start : place.end]
        of, to = [host.tensor[start:end] for start, end in runs], [flat[start:end] for start, end in runs]
        with self._exclusive:
            after = [window.allocated, *place.after, *([] if residence.ticket is None else [residence.ticket])]
            slot.came = self._engine.reload_into(of, to, after)
        bucket.arrive(params, flat)

    def _one(
        self,
        bucket: Bucket,
        changing: Set[Param],
        step: Callable[[Bucket], bool],
        replace: Callable[[Bucket], None],
    ) -> None:
        stream = self._device.current_stream()
        residence = bucket.residence if changing and not bucket.stays else None
        slot = None if self._window is None else self._window.slots.get(bucket)
        came = None if slot is None else slot.came
        if came is not None:
            came.hold(stream)
        if residence is None:
            if not step(bucket):
                replace(bucket)
            return
        # Asked for before anything is changed: there may be no room.
        host = residence.take(blank=not bucket.away()) if slot is None else slot.host
        done = None
        fits = True
        try:
            fits = step(bucket)
            of, to, strangers = bucket.leave(host, changing, self._split) if fits else ([], [], [])
            if of:
                with self._exclusive:
                    done = self._engine.offload(of, to, [stream])
                if strangers:
                    # Their memory is free for the next bucket as soon as they are gone from here.
                    done.hold(stream)
        finally:
            residence.leave(done, came)
            if not fits:
                replace(bucket)
            if slot is not None and self._window is not None:
                done = done or Ticket(stream.record_event(), self._device)
                self._window.slots.pop(bucket).place.leave([done])


class _Window:
    """Device memory that buckets pass through, and those that are in it.

    allocated: whoever had the memory before is still at work until then.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self.stream = device.current_stream()
        self.flat = device.empty(nbytes, torch.uint8)
        self.ring: Ring[Ticket] = Ring(nbytes)
        self.allocated = Ticket(self.stream.record_event(), device)
        self.slots: dict[Bucket, _Slot] = {}

    def keep_only(self, buckets: Sequence[Bucket]) -> None:
        """What came for nothing leaves its place."""
        for bucket in [bucket for bucket in self.slots if bucket not in buckets]:
            self._drop(bucket)

    def close(self, stream: Stream) -> None:
        for bucket in list(self.slots):
            self._drop(bucket)
        for ticket in self.ring.waits():
            ticket.hold(stream)
        if stream.stream_id != self.stream.stream_id:
            # The memory goes back to the stream on which it was allocated.
            self.stream.wait_event(stream.record_event())

    def _drop(self, bucket: Bucket) -> None:
        slot = self.slots.pop(bucket)
        bucket.drop_flat()
        slot.residence.leave(None, slot.came)
        slot.place.leave(slot.place.after if slot.came is None else [slot.came])


@dataclass(slots=True, eq=False)
class _Slot:
    """A bucket's place in the window, and its bytes on the host. came: the copy between the two."""

    place: Range[Ticket]
    residence: Residence
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

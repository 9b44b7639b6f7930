"""Brings buckets to the device, has them stepped, and takes them back, all at the same time."""

from __future__ import annotations

import logging
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from ..device.device import Device, Stream
from ..device.transfer import Ticket, TransferEngine
from ..errors import TierFull
from ..ground.interrupts import uninterrupted
from ..sizes import format_bytes
from ..tiers.host_tier import HostSlot
from ..tiers.shelf import Exclusive
from .bucket import Bucket, Residence, Residences, fetch_ahead, pack
from .layout import Param, Splitter, StateLayout, layout_of

T = TypeVar("T")
_log = logging.getLogger("tiered_mem.optimizer")
# The share of the parameters that may still be without a gradient.
_LAST = 0.1


class Pipeline:
    """The buckets of one optimizer, and their ways through the device, in one step after the other.

    While one is stepped on the compute stream the next one comes, and the one before leaves, on a stream of its own
    each. The host waits for none of this. They pass through a window of device memory, a ring, which is there
    during a step only: it is allocated on the compute stream, which at the end waits for the last copy.

    exclusive: inside, the engine may be called. residences: for the buckets. split: says what of a state moves.
    name: of the optimizer. in_order: the buckets have the order of the parameters.

    buckets: in the order in which they are stepped.
    """

    def __init__(
        self,
        device: Device,
        engine: TransferEngine,
        exclusive: Exclusive,
        residences: Residences,
        split: Splitter,
        name: str,
        *,
        in_order: bool,
    ) -> None:
        self._engine = engine
        self._exclusive = exclusive
        self._split = split
        self._in_order = in_order
        self._name = name
        self._window: _Window | None = None
        self.device = device
        self.residences = residences
        self.buckets: list[Bucket] = []

    @property
    def nbytes(self) -> int:
        """What all states take that can move."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def kept(self) -> int:
        """The bytes of those that stay, and are on the device by now."""
        return sum(bucket.nbytes for bucket in self.buckets if bucket.stays and bucket.here())

    @property
    def window_bytes(self) -> int:
        """The device memory that states pass through in a step."""
        # Room for one that comes, one that is stepped, one that leaves, and for what is lost where the ring ends.
        largest = max((bucket.nbytes for bucket in self.buckets), default=0)
        large = largest if largest > self.residences.bucket_bytes // 2 else 0
        moving = sum(bucket.nbytes for bucket in self.buckets if not bucket.stays)
        return min(2 * self.residences.bucket_bytes + large, moving)

    def run(self, changing: Mapping[Bucket, Set[Param]], step: Callable[[Bucket], None]) -> None:
        """Steps the buckets in order.

        changing: the parameters of each bucket whose states the step needs and changes. step: does it.

        Raises what `step` and the residences raise, and torch.OutOfMemoryError.
        """
        try:
            if self._window is not None:
                self._window.keep_only([bucket for bucket in self.buckets if changing[bucket]])
            for index, bucket in enumerate(self.buckets):
                self._settle(bucket)
                self._bring(bucket, changing[bucket])
                if bucket.away(changing[bucket]):
                    raise RuntimeError("a bucket found no place in the window, though all before it have left")
                following = self.buckets[index + 1 :]
                fetch_ahead(following, changing)
                if following and (after := following[0].residence) is not None and after.ready:
                    # Some optimizers make the host wait in the middle of a step.
                    self._bring(following[0], changing[following[0]])
                self._one(bucket, changing[bucket], step)
        finally:
            self.drop()

    def prefetch_first(self) -> None:
        """Begins to bring what the step to come needs first, if the memory is there."""
        first = next((bucket for bucket in self.buckets if bucket.away() and not bucket.stays), None)
        # Not on top of what backward needs: the peak stays what it is.
        if first is not None and self.window_bytes <= self.device.below_peak():
            with suppress(torch.OutOfMemoryError):
                self.prefetch(first)

    def prefetch(self, bucket: Bucket) -> None:
        """Begins to bring a bucket for the step to come. Where that would take a wait, only to the host."""
        if bucket.residence is None or self._window is not None:
            return
        if not bucket.residence.ready:
            bucket.residence.fetch()
            return
        self._bring(bucket, set(bucket.params))

    def drop(self) -> None:
        """Whatever is still in the window is left as it was when it came, and the window's memory is freed."""
        window, self._window = self._window, None
        if window is not None:
            window.close(self.device.current_stream())

    def forget(self) -> None:
        """What of the states is on the device is of no use any more, for others come in their place."""
        self.drop()
        for bucket in self.buckets:
            bucket.drop_flat()

    def offload(self, buckets: Iterable[Bucket]) -> None:
        """Copies to the residences what is on the device, outside of a step, and waits for that."""
        stream = self.device.current_stream()
        sent = [each for bucket in buckets if (each := self._start_offload(bucket, stream)) is not None]
        if sent:
            last, _ = sent[-1]
            last.wait()

    def offload_stepped(self) -> None:
        """As `offload` for all that are not to stay, and the current stream waits.

        What there is no room for stays on the device, for the step is done.
        """
        stream = self.device.current_stream()
        for bucket in [bucket for bucket in self.buckets if not bucket.stays]:
            try:
                sent = self._start_offload(bucket, stream)
            except TierFull as error:
                self._tell_stays(bucket, "", error)
                continue
            if sent is not None:
                copied, _ = sent
                copied.hold(stream)  # the memory is free for what comes next on the stream
            self.residences.poll()

    def reload(self, buckets: Sequence[Bucket]) -> None:
        """Copies to the device what is away, outside of a step.

        Raises torch.OutOfMemoryError and what the residences raise; then all of it is away as before.
        """
        stream = self.device.current_stream()
        away = [bucket for bucket in buckets if bucket.away()]
        flats = [self.device.empty(bucket.nbytes, torch.uint8) for bucket in away]
        try:
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
        except BaseException:
            for bucket in away:
                bucket.drop_flat()
            raise

    def keep(self, nbytes: int) -> None:
        """The first buckets of so many bytes stay on the device from the next step on; all others leave it now."""
        self.drop()
        for bucket in self.buckets:
            bucket.stays = 0 < bucket.nbytes <= nbytes
            nbytes -= bucket.nbytes if bucket.stays else 0
        self.offload(bucket for bucket in self.buckets if not bucket.stays)

    def refit(self, bucket: Bucket) -> bool:
        """Finds another residence for a bucket whose states have other tensors by now, or other shapes.

        All of it is on the device then. Where there is no room for it, it stays there. Returns whether it was so.
        """
        if bucket.fits(self._split):
            return False
        old, bucket.residence = bucket.residence, None
        if old is not None and bucket.away():
            bucket.arrive(bucket.params, old.copy_out().to(self.device.torch_device))
        bucket.lay_out(self._split)
        if old is not None:
            old.drop()
        self._house_anew(bucket)
        return True

    def renew(self) -> None:
        """Other buckets for states that have other tensors by now, or other shapes. All are on the device."""
        renewed: list[Bucket] = []
        for bucket in self.buckets:
            fits = bucket.fits(self._split, every=self._split.changes)
            renewed += [bucket] if fits else self._repacked(bucket)
        self.buckets = renewed

    def packed(self, layouts: Iterable[tuple[Param, StateLayout]]) -> list[Bucket]:
        """New buckets, without residences, for parameters and states of these layouts."""
        return pack(layouts, self.residences.bucket_bytes // 2, in_order=self._in_order)

    def close(self) -> None:
        """Frees all memory. The states are gone."""
        self.drop()
        for bucket in self.buckets:
            bucket.close()
        self.residences.close()

    def _repacked(self, old: Bucket) -> list[Bucket]:
        if old.residence is not None:
            old.residence.drop()
        layouts = ((param, layout_of(param, old.states.get(param, {}), self._split)) for param in old.params)
        buckets = self.packed(layouts)
        for bucket in buckets:
            bucket.states = {param: old.states[param] for param in bucket.params if param in old.states}
            self._house_anew(bucket)
        return buckets

    def _house_anew(self, bucket: Bucket) -> None:
        try:
            self.residences.house([bucket])
        except TierFull as error:
            self._tell_stays(bucket, "have changed their shapes, and ", error)

    def _tell_stays(self, bucket: Bucket, why: str, error: TierFull) -> None:
        size = format_bytes(bucket.nbytes)
        _log.warning("%s of states of %s %sstay on the device: %s", size, self._name, why, str(error))

    def _start_offload(self, bucket: Bucket, stream: Stream) -> tuple[Ticket, object] | None:
        """Returns the copy, and what has to live until it has ended; None where there is nothing to copy."""
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

    def _settle(self, bucket: Bucket) -> None:
        """Brings a bucket that is to stay, into memory of its own. Without room for it, it does not stay."""
        if bucket.stays and bucket.away():
            try:
                self.reload([bucket])
            except torch.OutOfMemoryError:
                bucket.stays = False

    def _bring(self, bucket: Bucket, params: Set[Param]) -> None:
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
            window = self._window = _Window(self.device, self.window_bytes)
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

    def _one(self, bucket: Bucket, changing: Set[Param], step: Callable[[Bucket], None]) -> None:
        stream = self.device.current_stream()
        residence = bucket.residence if changing and not bucket.stays else None
        slot = None if self._window is None else self._window.slots.get(bucket)
        came = None if slot is None else slot.came
        if came is not None:
            came.hold(stream)
        if residence is None:
            step(bucket)
            if self.refit(bucket):
                self.offload([bucket])
            return
        # Asked for before anything is changed: there may be no room.
        host = residence.take(blank=not bucket.away()) if slot is None else slot.host
        done = None
        fits = True
        try:
            step(bucket)
            fits = bucket.fits(self._split)
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
                self.refit(bucket)
                self.offload([bucket])
            if slot is not None and self._window is not None:
                done = done or Ticket(stream.record_event(), self.device)
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


class BackwardWatch:
    """Calls `near_end` when all but the last tenth of the parameters have got their last gradient before a step.

    Which is the last, of however many backwards, it has learned from the step before. Where that was different,
    `near_end` is called too early or not at all, and the next step is learned from.

    near_end: a method, of an object that is not kept alive.
    """

    def __init__(self, near_end: Callable[[], object]) -> None:
        self._near_end = weakref.WeakMethod(near_end)
        self._handles: list[RemovableHandle] = []
        self._order: list[Param] = []
        self._awaited: tuple[Param, int] | None = None
        self._count = 0
        self._called = False

    def step_ends(self, params: Iterable[Param]) -> None:
        """A step is over. params: those that the next one may have gradients for."""
        learned, self._order = self._order, []
        if not self._called:
            self._awaited = None
            if learned:
                times = Counter(learned)
                last = learned[-max(1, int(len(times) * _LAST))]
                self._awaited = last, times[last]
            self._watch(params if self._awaited is None else [self._awaited[0]])
        self._called = False
        self._count = 0

    def close(self) -> None:
        """Watches no more."""
        self._watch(())

    def _watch(self, params: Iterable[Param]) -> None:
        for handle in self._handles:
            handle.remove()
        me = weakref.ref(self)

        # What a weight's hook raises leaves nodes in a queue of autograd's, and what they have saved alive.
        @uninterrupted
        def gradient_is_there(param: Param) -> None:
            watch = me()
            if watch is not None:
                watch._note(param)

        self._handles = []
        for param in params:
            if not (param.is_leaf and param.requires_grad):
                continue  # it may have been frozen since
            handle = param.register_post_accumulate_grad_hook(gradient_is_there)  # type: ignore[no-untyped-call]
            self._handles.append(handle)

    def _note(self, param: Param) -> None:
        if self._awaited is None:
            self._order.append(param)
            return
        self._count += 1  # there are hooks on this one parameter alone
        if self._count == self._awaited[1]:
            self._called = True
            if (near_end := self._near_end()) is not None:
                near_end()

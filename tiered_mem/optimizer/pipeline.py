"""Brings buckets to the device, has them stepped, and takes them back, all at the same time."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from itertools import islice

import torch

from ..device.device import Device, Stream
from ..device.transfer import Ticket, TransferEngine
from ..errors import TierFull
from ..sizes import format_bytes
from ..tiers.shelf import Exclusive
from .bucket import AHEAD, Bucket, Residences, fetch_ahead, pack
from .layout import Param, Splitter, StateLayout, layout_of
from .window import Slot, Window

_log = logging.getLogger("tiered_mem.optimizer")


class Pipeline:
    """The buckets of one optimizer, and their ways through the device, in one step after the other.

    While one is stepped on the compute stream the next one comes, and the one before leaves, on a stream of its own
    each. The host waits for none of this. They pass through a window of device memory, a ring, which is there
    during a step only: it is allocated on the compute stream, which at the end waits for the last copy.

    With memory to spare buckets may also come ahead of a step, each into memory of its own. That, and the window,
    goes back to torch's pool with copies out still under way then. The compute stream does not wait for them; the
    host does, before it takes such memory the next time.

    exclusive: inside, the engine may be called. residences: for the buckets. split: says what of a state moves.
    name: of the optimizer. in_order: the buckets have the order of the parameters. planned: all memory is, so that
    nothing comes ahead of a step. overlapped: steps are made beside forward or backward.

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
        planned: bool,
        overlapped: bool,
    ) -> None:
        self._engine = engine
        self._exclusive = exclusive
        self._split = split
        self._in_order = in_order
        self._name = name
        self._window: Window[Bucket] | None = None
        self._planned = planned
        self._spare = overlapped and not planned
        self._own: dict[Bucket, Slot] = {}
        # The last copies out of memory that was given up: of the window before, and of what had memory of its own.
        self._left_window: list[Ticket] = []
        self._left_own: list[Ticket] = []
        self._ending = False
        self._most = sys.maxsize  # of the window
        self._told: set[str] = set()  # why it is narrow
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
        largest = self.largest
        large = largest if largest > self.residences.bucket_bytes // 2 else 0
        moving = sum(bucket.nbytes for bucket in self.buckets if not bucket.stays)
        return min(2 * self.residences.bucket_bytes + large, moving, max(self._most, largest))

    @property
    def largest(self) -> int:
        """The bytes of the largest bucket."""
        return max((bucket.nbytes for bucket in self.buckets), default=0)

    def pass_through(self, nbytes: int) -> None:
        """States pass through no more than that from now on, or the least that will do: the largest bucket."""
        whole = self.window_bytes
        self._most = min(self._most, nbytes)
        self._tell_narrow(self.window_bytes, whole, "the budget has no room for it. Raise device_budget")

    @contextmanager
    def only(self, buckets: Sequence[Bucket]) -> Iterator[None]:
        """Inside, these buckets are stepped, with which the step ends. What came of others leaves its place."""
        self._ending = True
        try:
            if self._window is not None:
                self._window.keep_only(buckets)
            yield
        finally:
            self._ending = False
            self.drop()

    def one(
        self,
        bucket: Bucket,
        changing: Set[Param],
        step: Callable[[Bucket], None],
        following: Collection[tuple[Bucket, Set[Param]]] = (),
    ) -> None:
        """Steps one bucket.

        changing: the parameters whose states the step needs and changes. step: does it. following: buckets that
        come meanwhile, and what is needed of each.

        Raises what `step` and the residences raise, and torch.OutOfMemoryError.
        """
        if bucket.stays and bucket.away():
            try:
                self.reload([bucket])  # into memory of its own
            except torch.OutOfMemoryError:
                bucket.stays = False
        if not self._bring(bucket, changing) and self._window is not None:
            self._window.keep_only([])  # those that came ahead of it are in its place
            self._bring(bucket, changing)
        if bucket.away(changing):
            raise RuntimeError("a bucket found no place in the window, though all before it have left")
        self.bring(following)
        self._one(bucket, changing, step)

    def bring(self, following: Collection[tuple[Bucket, Set[Param]]]) -> None:
        """Begins to bring buckets, as many of the first as there is room for. It never waits for a drive."""
        for number, (bucket, params) in enumerate(following):
            if (residence := bucket.residence) is None or bucket.stays or not bucket.away(params):
                continue
            if not residence.ready:  # some optimizers make the host wait in the middle of a step
                fetch_ahead([each for each, _ in islice(following, number, number + AHEAD)])
                return
            if not self._bring(bucket, params):
                return

    def bucket_of(self, key: object) -> Bucket | None:
        """The one that has the state of a parameter."""
        return next((bucket for bucket in self.buckets if key in bucket.states), None)

    def bring_ahead(self, buckets: deque[Bucket], room: int, stream: Stream) -> None:
        """Begins to bring buckets for the step to come, each into memory of its own, and takes them off the queue.

        room: the bytes that they may take. stream: on which they will be stepped.
        """
        while self._spare and buckets:
            bucket = buckets[0]
            if (residence := bucket.residence) is None or bucket.stays or not bucket.away():
                buckets.popleft()
                continue
            if not residence.ready or bucket.nbytes > room:
                fetch_ahead([*islice(buckets, AHEAD)])
                return
            room -= bucket.nbytes
            _let_end(self._left_own)
            with self.device.on(stream):
                flat = self.device.empty(bucket.nbytes, torch.uint8)
            slot = Slot(None, residence, residence.take(blank=False))
            self._start(bucket, slot, set(bucket.params), flat, [Ticket(stream.record_event(), self.device)])
            buckets.popleft()

    def prefetch_first(self) -> None:
        """Begins to bring what the step to come needs first, if the memory is there."""
        first = [(bucket, set(bucket.params)) for bucket in self.buckets if bucket.away() and not bucket.stays][:1]
        # Not on top of what backward needs: the peak stays what it is.
        if not (self._planned or self._window) and self.window_bytes <= self.device.below_peak():
            with suppress(torch.OutOfMemoryError):
                self.bring(first)

    def drop(self) -> None:
        """Whatever came and was not stepped is left as it was, and the memory that it came to is freed."""
        stream = self.device.current_stream()
        waits = [slot.came for slot in self._own.values() if slot.came is not None]
        for bucket, slot in self._own.items():
            flat = bucket.flat
            bucket.drop_flat()
            slot.residence.leave(None, slot.came)
            if flat is not None:
                self._engine.may_outlive(flat)
        self._own.clear()
        window, self._window = self._window, None
        if window is not None:
            waits += window.empty(left=not self._spare)
        # What came for nothing has been read on the host, where something else may be written next.
        for ticket in waits:
            ticket.hold(stream)
        if window is not None:
            window.give_back(stream)
            if self._spare:
                self._left_window = window.ring.waits()
                self._engine.may_outlive(window.flat)

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

    def _bring(self, bucket: Bucket, params: Set[Param]) -> bool:
        """Whether what is needed of the bucket is on the device, or on its way there."""
        window, residence = self._window, bucket.residence
        if not bucket.runs(params) or residence is None or bucket.stays:
            return True
        if window is None:
            _let_end(self._left_window)
            window = self._window = self._new_window()
        elif bucket in window.slots:
            window.drop(bucket)  # other parameters of it have come
        place = window.ring.take(bucket.nbytes)
        if place is None:
            return False  # it would overlap a bucket that is to be stepped before
        try:
            host = residence.take(blank=False)
        except BaseException:
            place.leave(place.after)
            raise
        slot, flat = Slot(place, residence, host), window.flat[place.start : place.end]
        self._start(bucket, slot, params, flat, [window.allocated, *place.after])
        return True

    def _new_window(self) -> Window[Bucket]:
        nbytes, least = self.window_bytes, self.largest
        try:
            return Window(self.device, nbytes)
        except torch.OutOfMemoryError:
            if least >= nbytes:
                raise
        self._tell_narrow(least, nbytes, "torch's pool has no piece for it. Lower bucket_bytes or device_budget")
        return Window(self.device, least)

    def _tell_narrow(self, window: int, whole: int, why: str) -> None:
        if window < whole and why not in self._told:
            self._told.add(why)
            told = "steps of %s go through %s of device memory in place of %s, and buckets wait for each other: %s"
            _log.warning(told, self._name, format_bytes(window), format_bytes(whole), why)

    def _start(
        self, bucket: Bucket, slot: Slot, params: Set[Param], flat: torch.Tensor, after: list[Ticket]
    ) -> None:
        """Starts the copy of a bucket that has its place."""
        slots = self._own if slot.place is None or self._window is None else self._window.slots
        slots[bucket] = slot
        runs, host = bucket.runs(params), slot.host.tensor
        of, to = [host[start:end] for start, end in runs], [flat[start:end] for start, end in runs]
        filled = None if bucket.residence is None else bucket.residence.ticket
        with self._exclusive:
            slot.came = self._engine.reload_into(of, to, [*after, *([filled] if filled else [])])
        bucket.arrive(params, flat)

    def _one(self, bucket: Bucket, changing: Set[Param], step: Callable[[Bucket], None]) -> None:
        stream = self.device.current_stream()
        residence = bucket.residence if changing and not bucket.stays else None
        slots = self._window.slots if self._window is not None and bucket not in self._own else self._own
        slot = slots.get(bucket)
        came = None if slot is None else slot.came
        if came is not None:
            with self._exclusive:
                # A wait for states beside a layer is no part of the time that the layer takes.
                came.hold(stream, None if self._ending else "states")
        if residence is None:
            step(bucket)
            if self.refit(bucket):
                self.offload([bucket])
            return
        # Asked for before anything is changed: there may be no room.
        host = residence.take(blank=not bucket.away()) if slot is None else slot.host
        done, flat, fits = None, bucket.flat, True
        try:
            step(bucket)
            fits = bucket.fits(self._split)
            of, to, strangers = bucket.leave(host, changing, self._split) if fits else ([], [], [])
            if of:
                with self._exclusive:
                    done = self._engine.offload(of, to, [stream])
                for each in strangers if self._spare else ():
                    self._engine.may_outlive(each)
                if strangers and not self._spare:
                    # Their memory is free for the next bucket as soon as they are gone from here.
                    done.hold(stream)
        finally:
            residence.leave(done, came)
            if not fits:
                self.refit(bucket)
                self.offload([bucket])
            if slot is not None:
                slots.pop(bucket)
                if slot.place is not None:
                    slot.place.leave([done or Ticket(stream.record_event(), self.device)])
                elif flat is not None:
                    self._engine.may_outlive(flat)
                    self._left_own = self._left_own if done is None else [done]


def _let_end(copies: list[Ticket]) -> None:
    """Waits for copies out of memory that was given up, before as much is taken again.

    torch's pool has it back when the host has seen that they ended. Without the wait a host that is steps ahead of
    the device would get other memory in each of them.
    """
    for copied in copies:
        copied.wait()
    copies.clear()

"""Bytes that rest in host memory or on disk, and what is under way between the two."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from ..device.transfer import Ticket
from ..errors import Closed, TierFull
from ..spill.lower_tier import Job, LowerTier, Piece, Record
from .host_tier import HostSlot, HostTier, flat_form

# Inside, the host tier is the caller's alone.
Exclusive = AbstractContextManager[None]
# Seconds between two looks at what has ended, while the host waits for a file.
_LOOK_AGAIN = 1e-3


class ParcelState(Enum):
    """What the slot of a parcel is about.

    AWAY: there is none. COMING: a read fills it, or did. TAKEN: somebody uses it. LEAVING: it is to be written, or
    is being written. KEPT: there is no disk, or it did not take it. DROPPED: nobody needs the bytes any more.
    """

    AWAY = auto()
    COMING = auto()
    TAKEN = auto()
    LEAVING = auto()
    KEPT = auto()
    DROPPED = auto()


@dataclass(slots=True, eq=False)
class Parcel:
    """Bytes in `record`, in `slot`, or in both.

    name: in records and in errors. record: complete. newer: the slot has bytes that are in no complete record.
    read, write: what is under way, or has ended and was not noticed yet.
    last: the copy of the slot that ends after all others. The next one has to come after it.
    """

    name: str
    nbytes: int
    state: ParcelState = ParcelState.AWAY
    record: Record | None = None
    slot: HostSlot | None = None
    newer: bool = False
    read: Job | None = None
    write: Record | None = None
    last: Ticket | None = None

    @property
    def job(self) -> Job | None:
        """What is under way."""
        return self.read if self.write is None else self.write.job

    @property
    def memory(self) -> HostSlot:
        """Its part of the slot."""
        if self.slot is None:
            raise RuntimeError(f"{self.name} has no slot")
        return HostSlot(self.slot.tensor[: self.nbytes], self.slot.lease)


class Shelf:
    """Host slots, each of which has the bytes of one parcel at a time, or none, and the disk behind them.

    What was changed goes to disk as a new record, once the last copy of its slot has ended. Only when that is
    written does the older record go, and is the slot free. What the disk does not take stays in its slot, where it
    is complete, and is tried again later.

    Not thread-safe, and waits only where it says so.

    slots: are closed with the last parcel. disk: belongs to whoever made it; None for a shelf whose parcels stay in
    their slots. kind, step: are written into the records, for people. refusal: what the disk said last.
    """

    def __init__(self, slots: FixedSlots, disk: LowerTier | None, kind: str, step: int = 0) -> None:
        self._disk = disk
        self._kind = kind
        self._in_slots: dict[Parcel, None] = {}  # those on their way out in the order of leaving
        self._parcels = 0
        self.slots = slots
        self.step = step
        self.refusal = ""

    @property
    def to_disk(self) -> bool:
        """Whether there is a disk behind it."""
        return self._disk is not None

    @property
    def kept(self) -> int:
        """How many parcels are in host memory because the disk did not take them."""
        return len(self._that_are(ParcelState.KEPT))

    def parcel(self, name: str, nbytes: int) -> Parcel:
        """A new one, which has no bytes yet."""
        self._parcels += 1
        return Parcel(name, nbytes)

    def poll(self) -> None:
        """Takes note of what has ended, and begins what can begin now."""
        self.slots.poll()
        if self._disk is None:
            return
        for parcel in self._that_are(ParcelState.LEAVING):
            if parcel.write is None:
                if parcel.last is None or parcel.last.event.query():
                    self._begin_write(parcel, self._disk)
            elif parcel.write.job.done:
                self._end_write(parcel, parcel.write)
                if not parcel.newer:
                    self._free(parcel)
        for parcel in self._that_are(ParcelState.KEPT):
            if not self._disk.accepts(parcel.nbytes):
                break
            self._begin_write(parcel, self._disk)

    def wait(self) -> bool:
        """Waits for what will free a slot: a copy, or a write. False if nothing will. Raises DeviceFailed."""
        if not self.slots.wait():
            leaving = self._that_are(ParcelState.LEAVING)
            if not leaving:
                return False
            first = leaving[0]
            if first.write is not None:
                self._wait_for(first.write.job)
            elif first.last is not None:
                first.last.wait()
        self.poll()
        return True

    def read(self, parcel: Parcel, slot: HostSlot, *, blank: bool = False) -> None:
        """Gives a parcel a free slot, and begins to read its record into that, if it has one. Raises Closed.

        blank: it is not read.
        """
        try:
            if parcel.record is not None and self._disk is not None and not blank:
                parcel.read = self._disk.read(parcel.record, [(0, slot.tensor.data_ptr())])
        except BaseException:
            self.slots.free(slot)
            raise
        parcel.slot, parcel.state = slot, ParcelState.COMING
        self._in_slots[parcel] = None

    def take(self, parcel: Parcel, *, blank: bool) -> HostSlot:
        """The memory of a parcel that has a slot, until `put`. Waits for the file operation that uses it.

        Raises OSError or CorruptRecord where that was a read which failed, unless the bytes are not needed (blank).
        The parcel is away again then.
        """
        if parcel.write is not None:
            # It reads the slot, which whoever takes it may change.
            parcel.write.job.wait()
            self._end_write(parcel, parcel.write)
        if parcel.read is not None:
            self._wait_for(parcel.read)
            error, parcel.read = parcel.read.error, None
            if error is not None and not blank:
                self._free(parcel)
                try:
                    raise error
                finally:
                    del error  # or it and this frame would keep each other alive
        parcel.state = ParcelState.TAKEN
        return parcel.memory

    def put(self, parcel: Parcel) -> None:
        """Nobody uses the memory any more but its last copy. What is newer is written after that."""
        if not parcel.newer:
            self._free(parcel)
            return
        parcel.state = ParcelState.KEPT if self._disk is None else ParcelState.LEAVING
        del self._in_slots[parcel]
        self._in_slots[parcel] = None  # the last of all

    def drop_clean(self) -> bool:
        """Frees the slot of the parcel that was read last, and is on disk still. False if there is none."""
        coming = self._that_are(ParcelState.COMING)
        if coming:
            self._free(coming[-1])
        return bool(coming)

    def drop(self, parcel: Parcel) -> None:
        """Gives up a parcel, in memory and on disk. With the last one the slots go, after file operations."""
        self._drop_record(parcel.record)
        self._drop_record(parcel.write)
        self._free(parcel)
        parcel.record = parcel.write = None
        parcel.newer = False
        parcel.state = ParcelState.DROPPED
        self._parcels -= 1
        if not self._parcels:
            self.slots.close()

    def close(self) -> None:
        """Gives the slots back. Nobody may use one any more, not even one that is taken."""
        for parcel in list(self._in_slots):
            self.drop(parcel)
        self.slots.close()

    def _begin_write(self, parcel: Parcel, disk: LowerTier) -> None:
        parcel.last = None
        piece = Piece(parcel.name, parcel.memory.tensor.data_ptr(), parcel.nbytes, "uint8")
        try:
            parcel.write = disk.write([piece], step=self.step, kind=self._kind)
        except (TierFull, Closed) as error:
            self._keep(parcel, str(error))
        else:
            parcel.state = ParcelState.LEAVING

    def _end_write(self, parcel: Parcel, record: Record) -> None:
        """The write is done. If it failed, the bytes are in the slot only."""
        parcel.write = None
        if record.job.error is None:
            self._drop_record(parcel.record)
            parcel.record = record
            parcel.newer = False
        else:
            self._keep(parcel, str(record.job.error))

    def _keep(self, parcel: Parcel, refusal: str) -> None:
        self.refusal = refusal
        parcel.state = ParcelState.KEPT
        # The slot has all of the newer bytes. The older record's room may be just what the disk lacks.
        self._drop_record(parcel.record)
        parcel.record = None

    def _drop_record(self, record: Record | None) -> None:
        if record is not None and self._disk is not None:
            self._disk.release(record)

    def _wait_for(self, job: Job) -> None:
        while not job.wait(_LOOK_AGAIN):
            self.poll()  # what has left the device meanwhile can be written

    def _free(self, parcel: Parcel) -> None:
        """The parcel has no slot any more, which is free when what is under way there has ended."""
        slot, last, job = parcel.slot, parcel.last, parcel.job
        parcel.slot = parcel.last = parcel.read = None
        parcel.state = ParcelState.AWAY
        self._in_slots.pop(parcel, None)
        if slot is not None:
            self.slots.free(slot, last, job)

    def _that_are(self, state: ParcelState) -> list[Parcel]:
        return [parcel for parcel in self._in_slots if parcel.state is state]


class FixedSlots:
    """Host slots of `nbytes` bytes: `wanted` of them from now to `close`, and more where `more` is called.

    A slot is freed with what may still use it, and is there again when that has ended.

    exclusive: entered around each use of the host tier, and not while this waits for anything.
    count: how many slots there are now.

    Raises TierFull, with this advice, where the host tier has no room for that many; then there is none.
    """

    def __init__(self, host: HostTier, exclusive: Exclusive, nbytes: int, wanted: int, advice: str) -> None:
        self._host = host
        self._exclusive = exclusive
        self._wanted = wanted
        self._free: list[HostSlot] = []
        self._used: list[_Used] = []
        self.nbytes = nbytes
        self.count = 0
        try:
            for _ in range(wanted):
                self._free.append(self.more(advice))
        except BaseException:
            self.close()
            raise

    def get(self) -> HostSlot | None:
        """A free slot, if there is one."""
        self.poll()
        return self._free.pop() if self._free else None

    def more(self, advice: str) -> HostSlot:
        """Another slot of the host tier. Raises TierFull with the advice, as the tier knows only of activations."""
        with self._exclusive:
            (slot,) = self._host.reserve([flat_form(self.nbytes)], advice)
        self.count += 1
        return slot

    def free(self, slot: HostSlot, last: Ticket | None = None, job: Job | None = None) -> None:
        """last: the copy that ends after all others of the slot. job: what writes it to a file, or fills it."""
        self._used.append(_Used(slot, last, job))
        self.poll()

    def poll(self) -> None:
        """Takes note of what has ended. Does not wait."""
        for used in [used for used in self._used if used.ended()]:
            self._used.remove(used)
            if self.count <= self._wanted:
                self._free.append(used.slot)
            else:
                self._return(used.slot, None)

    def wait(self) -> bool:
        """Waits for what has used a slot the longest. False if there is none. Raises DeviceFailed."""
        if not self._used:
            return False
        _, last, job = self._used[0]
        if last is not None:
            last.wait()
        if job is not None:
            job.wait()
        self.poll()
        return True

    def close(self) -> None:
        """Returns all slots that were freed to the host tier, after the file operations that use them."""
        for slot, last, job in [*self._used, *(_Used(slot) for slot in self._free)]:
            if job is not None:
                job.wait()
            self._return(slot, last)
        self._used.clear()
        self._free.clear()

    def _return(self, slot: HostSlot, last: Ticket | None) -> None:
        self.count -= 1
        with self._exclusive:
            self._host.release(slot, None if last is None else last.event)


class _Used(NamedTuple):
    """A slot that was freed, and what may still use it."""

    slot: HostSlot
    last: Ticket | None = None
    job: Job | None = None

    def ended(self) -> bool:
        return (self.last is None or self.last.event.query()) and (self.job is None or self.job.done)

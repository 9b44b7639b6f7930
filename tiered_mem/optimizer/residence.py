"""Where the states of one optimizer rest between steps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import suppress

import torch

from ..allocators import round_up
from ..errors import Closed, TierFull
from ..fixed_slots import Exclusive, FixedSlots
from ..host_tier import HostSlot, HostTier
from ..shelf import Shelf, State
from ..sizes import format_bytes
from ..spill.disk_tier import DiskTier
from ..transfer import Ticket

# Some are read, one is stepped, the next is on the device already, and some are written.
_SLOTS = 8
_SLOTS_FOR_LARGE = 3


class Residence:
    """Where the bytes of one bucket rest between steps: a parcel of a shelf, of which it takes care.

    Not thread-safe: one step runs at a time. `take` and `leave` come in pairs, and nothing else but `ticket`
    between them. What is called out of turn raises RuntimeError, and `take` after `release` raises Closed.

    shelf: with slots of at least `nbytes`. name: of the bucket, in its records and in errors.
    """

    def __init__(self, shelf: Shelf, nbytes: int, name: str) -> None:
        self._shelf = shelf
        self._parcel = shelf.parcel(name, nbytes)

    def fetch(self) -> None:
        """Begins to bring the bytes into host memory, where there is room for them.

        Does not wait, and never raises for a failed read: `take` does.
        """
        if self._parcel.slot is None and self._parcel.record is not None:
            self._shelf.poll()
            slot = self._shelf.slots.get()
            if slot is not None:
                with suppress(Closed):
                    self._shelf.read(self._parcel, slot)

    @property
    def ready(self) -> bool:
        """Whether the bytes are in host memory, and `take` would not wait."""
        job = self._parcel.job
        return self._parcel.slot is not None and (job is None or job.done)

    def take(self, *, blank: bool = False) -> HostSlot:
        """The host memory of the bytes, a uint8 slot of as many, until `leave`.

        blank: the bytes that there may be are not needed, all of the memory is to be filled.

        May wait. Raises CorruptRecord, OSError, TierFull or Closed before anything is changed, and may be called
        again after that.
        """
        parcel = self._parcel
        if parcel.state is State.DROPPED:
            raise Closed(f"{parcel.name} was released, or its optimizer closed")
        self._check_turn(taken=False)
        if not (blank or parcel.newer or parcel.record is not None):
            raise RuntimeError("there are no bytes yet: take(blank=True) is for the first ones")
        if parcel.slot is None:
            self._shelf.read(parcel, self._room(), blank=blank)
        return self._shelf.take(parcel, blank=blank)

    @property
    def ticket(self) -> Ticket | None:
        """The last copy that may still use the host memory: a reload has to come after it."""
        return self._parcel.last

    def leave(self, filled: Ticket | None, read: Ticket | None = None) -> None:
        """The copies in and out have been started.

        filled: the one that changed the host memory. None if nothing changed: then nothing is written back.
        read: the one that reads it, where no `filled` comes after that. The memory is left alone until it ended.
        """
        self._check_turn(taken=True)
        parcel = self._parcel
        parcel.last = filled or read or parcel.last
        parcel.newer = parcel.newer or filled is not None
        self._shelf.put(parcel)

    def release(self) -> None:
        """The bytes are not needed any more. Again does nothing.

        Waits for nothing on the device; the last one of a shelf does for the shelf's file operations.
        """
        self._check_turn(taken=False)
        if self._parcel.state is not State.DROPPED:
            self._shelf.drop(self._parcel)

    def copy_out(self) -> torch.Tensor:
        """The bytes as of the last `leave`: a uint8 tensor in pageable memory. Waits. Raises what `take` does."""
        slot = self.take()
        try:
            if self.ticket is not None:
                self.ticket.wait()
            return slot.tensor.clone()
        finally:
            self.leave(None)

    def _room(self) -> HostSlot:
        """A free slot. Waits for one where that helps, or takes a further one of the host tier."""
        shelf = self._shelf
        shelf.poll()
        while (slot := shelf.slots.get()) is None:
            if not shelf.wait() and not shelf.drop_clean():
                reason = f" and the disk takes nothing ({shelf.refusal})" if shelf.kept else ""
                full = f"optimizer states fill {shelf.slots.count} such slots{reason}; raise host_bytes"
                return shelf.slots.more(full)
        return slot

    def _check_turn(self, *, taken: bool) -> None:
        if taken is not (self._parcel.state is State.TAKEN):
            raise RuntimeError("take comes before leave" if taken else "the bytes are in use: leave comes first")


class Residences:
    """Makes residences for buckets: on disk, by way of a few slots of host memory, or on the host, each in its own.

    A shelf has slots of one size. They are reserved when residences are made, and are there until the last of them
    is released: a step does not depend on what room the host tier has.

    disk: None for the host. usual_bytes: buckets on disk that are larger share slots of their own.
    """

    def __init__(self, host: HostTier, disk: DiskTier | None, exclusive: Exclusive, usual_bytes: int) -> None:
        self._host = host
        self._disk = disk
        self._exclusive = exclusive
        self._usual_bytes = usual_bytes
        self._shelves: list[Shelf] = []
        self._numbers = itertools.count()
        self._step = 0

    def make(self, sizes: Sequence[int]) -> list[Residence]:
        """One for each number of bytes. Raises TierFull; then there is none."""
        self._shelves = [shelf for shelf in self._shelves if shelf.slots.count]
        if self._disk is None:
            advice = "it is for optimizer states: raise host_bytes, or put them on disk"
            shelves = self._build([(size, 1) for size in sizes], advice)
        else:
            self._check_disk(self._disk, sum(sizes))
            wanted = self._missing(sizes)
            self._build(wanted, self._advice(wanted))
            shelves = [self._fitting(size)[0] for size in sizes]
        return [
            Residence(shelf, size, f"states.{next(self._numbers)}")
            for shelf, size in zip(shelves, sizes, strict=True)
        ]

    @property
    def host_bytes(self) -> int:
        """The host memory that is taken."""
        return sum(shelf.slots.count * shelf.slots.nbytes for shelf in self._shelves)

    def step_begins(self) -> None:
        """What is written from now on is of the next step."""
        self._step += 1
        for shelf in self._shelves:
            shelf.step = self._step

    def progress(self) -> None:
        """Goes on with files that can go on. Does not wait."""
        if self._disk is not None:
            for shelf in self._shelves:
                shelf.poll()

    def settle(self) -> None:
        """Waits until every file is written."""
        for shelf in self._shelves:
            shelf.poll()
            while shelf.wait():
                pass

    def close(self) -> None:
        """Gives all host memory back."""
        for shelf in self._shelves:
            shelf.close()

    def _build(self, wanted: Sequence[tuple[int, int]], advice: str) -> list[Shelf]:
        """Shelves with slots of so many bytes, and so many of them. Raises TierFull; then there is none."""
        slots: list[FixedSlots] = []
        try:
            for nbytes, count in wanted:
                slots.append(FixedSlots(self._host, self._exclusive, nbytes, count, advice))
        except BaseException:
            for each in slots:
                each.close()
            raise
        new = [Shelf(each, self._disk, "optimizer", self._step) for each in slots]
        self._shelves = sorted([*self._shelves, *new], key=lambda shelf: shelf.slots.nbytes)
        return new

    def _missing(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """The size of the slots, and their number, of the shelves that are to be there for these buckets."""
        large = [size for size in sizes if size > self._usual_bytes]
        usual = [size for size in sizes if size <= self._usual_bytes]
        return [
            (max(some), min(slots, len(some)))
            for some, slots in ((large, _SLOTS_FOR_LARGE), (usual, _SLOTS))
            if some and not self._fitting(max(some))
        ]

    def _fitting(self, nbytes: int) -> list[Shelf]:
        """Those with slots that are large enough, the smallest first."""
        return [shelf for shelf in self._shelves if shelf.slots.nbytes >= nbytes]

    def _advice(self, wanted: Sequence[tuple[int, int]]) -> str:
        with self._exclusive:
            used = self._host.pool_stats().used
        enough = used + sum(slots * round_up(nbytes) for nbytes, slots in wanted)
        parts = " and ".join(f"{slots} of {format_bytes(nbytes)}" for nbytes, slots in wanted)
        return (
            f"optimizer states pass through slots of host memory on their ways to disk and back, {parts}: "
            f"host_bytes={enough} ({format_bytes(enough)}) is the least that will do, or lower bucket_bytes"
        )

    def _check_disk(self, disk: DiskTier, nbytes: int) -> None:
        used, limit = disk.stats().used, disk.capacity
        if nbytes > limit:
            advice = "it is for optimizer states: raise spill_bytes, or put them on the host"
            raise TierFull("disk", needed=nbytes, free=limit - used, used=used, limit=limit, advice=advice)

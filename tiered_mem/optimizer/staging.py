"""The host memory through which buckets of optimizer states come from disk and go there."""

from __future__ import annotations

from ..errors import Closed, TierFull
from ..spill.disk_record import Record
from ..spill.disk_tier import DiskTier
from ..spill.io_queue import Job
from ..spill.record_io import Piece
from ..tiers import HostSlot, HostTier
from ..transfer import Ticket
from .home import Home, State
from .residence import Exclusive, check_exists, check_turn, wait_for
from .staging_slots import StagingSlots

# Seconds between two looks at what has ended, while the host waits for a read.
_LOOK_AGAIN = 1e-3


class Staging:
    """A few host slots, each of which has the bytes of one bucket at a time, or none.

    A bucket that was changed goes to disk as a new record, once the copy that fills its slot has ended. Only when
    that is written does the older record go, and is the slot free. What the disk does not take stays in its slot,
    where it is complete, and is tried again later; a further slot of the host tier then replaces that one.

    Not thread-safe. disk: belongs to whoever made it. exclusive: entered around each use of the host tier, and not
    while this waits for anything. slot_bytes: the size of the largest bucket.

    step: is written into the records, for people. waits: how often `take` waited for copies or files.

    Raises TierFull where the host tier has no room for that many slots.
    """

    def __init__(self, host: HostTier, disk: DiskTier, exclusive: Exclusive, slot_bytes: int, slots: int) -> None:
        if slot_bytes < 1 or slots < 1:
            raise ValueError(f"{slots} slots of {slot_bytes} bytes were asked for; neither may be below 1")
        self._disk = disk
        self._slots = StagingSlots(host, exclusive, slot_bytes, slots)
        self._homes: dict[Home, None] = {}  # with a slot; those on their way out in the order of leaving
        self._refusal = ""
        self._closed = False
        self.step = 0
        self.waits = 0

    @property
    def slot_bytes(self) -> int:
        return self._slots.nbytes

    @property
    def slots(self) -> int:
        """How many there are now."""
        return self._slots.count

    @property
    def kept(self) -> int:
        """How many buckets are in host memory because the disk did not take them."""
        return len(self._that_are(State.KEPT))

    def progress(self) -> None:
        """Takes note of what has ended, and begins what can begin now. Does not wait."""
        self._slots.collect()
        for home in self._that_are(State.LEAVING):
            if home.write is None:
                if home.last is None or home.last.event.query():
                    self._begin_write(home)
            elif home.write.job.done:
                self._end_write(home, home.write)
                if not home.newer:
                    self._vacate(home)
        for home in self._that_are(State.KEPT):
            if not self._disk.accepts(home.nbytes):
                break
            self._begin_write(home)

    def settle(self) -> None:
        """Waits until every bucket that was left is on disk, or the disk has not taken it."""
        self.progress()
        while self._wait_for_write():
            pass

    def drain(self) -> None:
        """Waits until no copy and no file operation uses a slot, but for those that are taken."""
        for home in self._that_are(State.FETCHED):
            if home.read is not None:
                home.read.wait()
        self.settle()
        while self._slots.wait():
            pass

    def close(self) -> None:
        """Gives the slots back, after all that is under way. What is in no record is lost.

        Nobody may use a slot any more, not even one that is taken. Again does nothing.
        """
        self._closed = True
        self.drain()
        for home in list(self._homes):
            home.read = None
            home.newer = False
            self._vacate(home)
        self._slots.close()

    # What the residences call.

    def fetch(self, home: Home) -> None:
        """Begins to read a bucket, if there is a slot for it. Does not wait."""
        if self._closed or home.slot is not None or home.record is None:
            return
        self.progress()
        slot = self._slots.get()
        if slot is not None:
            try:
                self._begin_read(home, home.record, slot)
            except Closed:
                return  # take will say so

    def ready(self, home: Home) -> bool:
        """Whether the bytes are in a slot, and nothing uses it that has to be waited for."""
        if home.slot is None:
            return False
        return (home.read is None or home.read.done) and (home.write is None or home.write.job.done)

    def take(self, home: Home, *, blank: bool) -> HostSlot:
        """The slot of a bucket, with its bytes in it unless it is to be blank."""
        if self._closed or home.released:
            raise Closed(f"{home.name} was released, or its optimizer closed")
        check_turn(home.state is State.TAKEN, False)
        check_exists(home.exists or blank)
        if home.slot is None:
            slot = self._room()
            if blank or home.record is None:
                self._stage(home, slot, State.TAKEN)
            else:
                self._begin_read(home, home.record, slot)
        if home.write is not None:
            # The write reads the slot, which whoever takes it may change.
            self.waits += not home.write.job.done
            home.write.job.wait()
            self._end_write(home, home.write)
        if home.read is not None:
            self._end_read(home, home.read, blank)
        if home.slot is None:
            raise RuntimeError(f"{home.name} has no slot")
        home.state = State.TAKEN
        return HostSlot(home.slot.tensor[: home.nbytes], home.slot.lease)

    def leave(self, home: Home, filled: Ticket | None, read: Ticket | None) -> None:
        """Nobody uses the slot any more but these copies."""
        if self._closed:
            return
        check_turn(home.state is State.TAKEN, True)
        home.last = filled or read or home.last
        if filled is not None:
            home.filled = filled
            home.newer = True
        if home.newer and home.slot is not None:
            self._stage(home, home.slot, State.LEAVING)
        else:
            self._vacate(home)

    def release(self, home: Home) -> None:
        """Gives up a bucket, in memory and on disk."""
        check_turn(home.state is State.TAKEN, False)
        home.released = True
        self._give_up_record(home)
        job = home.read
        if home.write is not None:
            self._disk.release(home.write)
            job = home.write.job
        home.read = home.write = None
        home.newer = False
        self._vacate(home, job)

    def _room(self) -> HostSlot:
        """A free slot. Waits for one where that helps, or takes a further one of the host tier."""
        self.progress()
        slot = self._slots.get()
        self.waits += slot is None
        while slot is None:
            if self._slots.wait() or self._wait_for_write() or self._stop_fetching():
                self.progress()
                slot = self._slots.get()
            else:
                reason = f" and the disk takes nothing ({self._refusal})" if self.kept else ""
                slot = self._slots.more(f"optimizer states fill {self.slots} such slots{reason}; raise host_bytes")
        return slot

    def _wait_for_write(self) -> bool:
        """Waits for the copy or the write of the bucket that left first. False if there is none."""
        leaving = self._that_are(State.LEAVING)
        if not leaving:
            return False
        if leaving[0].write is not None:
            job = leaving[0].write.job
            while not job.wait(_LOOK_AGAIN):
                self.progress()  # what has left the device meanwhile can be written
        else:
            wait_for(leaving[0].last)
        self.progress()
        return True

    def _stop_fetching(self) -> bool:
        """Takes the slot of the bucket that was fetched last, as another one needs it first. False if none was."""
        fetched = self._that_are(State.FETCHED)
        if not fetched:
            return False
        home = fetched[-1]
        job, home.read = home.read, None
        self._vacate(home, job)
        return True

    def _begin_read(self, home: Home, record: Record, slot: HostSlot) -> None:
        try:
            home.read = self._disk.read(record, [(0, slot.tensor.data_ptr())])
        except BaseException:
            self._slots.give_back(slot)
            raise
        self._stage(home, slot, State.FETCHED)

    def _end_read(self, home: Home, job: Job, blank: bool) -> None:
        """Waits for a read. Raises what went wrong, unless the bytes are not needed."""
        self.waits += not job.done
        while not job.wait(_LOOK_AGAIN):
            self.progress()  # what has left the device meanwhile can be written
        home.read = None
        error = job.error
        if error is not None and not blank:
            self._vacate(home)
            try:
                raise error
            finally:
                del job, error  # or the error and this frame would keep each other alive

    def _begin_write(self, home: Home) -> None:
        if home.slot is None:
            raise RuntimeError(f"{home.name} has no slot")
        home.last = home.filled = None
        piece = Piece(home.name, home.slot.tensor.data_ptr(), home.nbytes, "uint8")
        try:
            home.write = self._disk.write([piece], step=self.step, kind="optimizer")
        except (TierFull, Closed) as error:
            self._keep(home, str(error))
        else:
            home.state = State.LEAVING

    def _end_write(self, home: Home, record: Record) -> None:
        """The write is done. If it failed, the bytes are in the slot only."""
        home.write = None
        if record.job.error is None:
            self._give_up_record(home)
            home.record = record
            home.newer = False
        else:
            self._keep(home, str(record.job.error))

    def _keep(self, home: Home, refusal: str) -> None:
        self._refusal = refusal
        home.state = State.KEPT
        # The slot has all of the newer bytes. The older record's room may be just what the disk lacks.
        self._give_up_record(home)

    def _give_up_record(self, home: Home) -> None:
        if home.record is not None:
            self._disk.release(home.record)
            home.record = None

    def _stage(self, home: Home, slot: HostSlot, state: State) -> None:
        home.slot = slot
        home.state = state
        self._homes.pop(home, None)
        self._homes[home] = None

    def _vacate(self, home: Home, job: Job | None = None) -> None:
        """The bucket has no slot any more. That is free after the last copy, and `job`."""
        slot, last = home.slot, home.last
        home.slot = home.last = home.filled = None
        home.state = State.AWAY
        self._homes.pop(home, None)
        if slot is not None:
            self._slots.give_back(slot, last, job)

    def _that_are(self, state: State) -> list[Home]:
        return [home for home in self._homes if home.state is state]

"""Several drives as one tier: each record lies whole on one of them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ..allocators.base import round_up
from ..errors import Closed, TierFull
from .disk_tier import DiskRecord, DiskTier
from .lower_tier import Job, Piece, State, TierStats, Watcher
from .record import ALIGNMENT

# Drives are alike that are through within so much of the time that the record itself takes: rates vary.
_ALIKE = 0.25
_STATES: tuple[State, ...] = ("failing", "budget spent", "ok")  # the worst first


class SeveralDrives:
    """Records on several drives, all of which read and write at once.

    A record goes to the drive that would be through with it first, by the bytes that it has under way and the rate
    that it has shown. Of drives that would be through at about the same time it is the one whose records would be
    read back the soonest, and of these the first one from `first` on.

    A drive that refuses, or that fails and is not written to for a while, leaves its part to the others. A write
    that fails ends in its job, and the caller offers it again; then another drive takes it. What can be read is on
    one drive only: where that fails, so does the read.

    drives: are closed with this tier. They share one clock.
    capacity: the bytes that all their files together may take, which they share as a `Room`.
    first: the number of the drive that is tried first as long as nothing else tells them apart.
    """

    def __init__(self, drives: Sequence[DiskTier], *, capacity: int, first: int = 0) -> None:
        self._drives = tuple(drives)
        self._capacity = capacity
        self._first = first
        self._peak = 0
        self._lock = threading.Lock()  # two writes at once might both take the last of what the drives share
        self._pid = os.getpid()
        self.now = self._drives[0].now

    def accepts(self, nbytes: int) -> bool:
        """Whether any drive would begin to write `nbytes` now. See `DiskTier`."""
        if os.getpid() != self._pid:
            return False
        with self._lock:
            return self._accept(nbytes) or (self._make_room(nbytes) and self._accept(nbytes))

    def write(self, pieces: Sequence[Piece], *, step: int, kind: str) -> PlacedRecord:
        """Begin to write a record to one of the drives. See `DiskTier`; it raises the same errors."""
        pieces = tuple(pieces)
        nbytes = sum(round_up(piece.nbytes) for piece in pieces)
        with self._locked():
            refusals: list[str] = []
            record = self._place(pieces, nbytes, step, kind, refusals)
            if record is None and self._make_room(nbytes):
                refusals.clear()
                record = self._place(pieces, nbytes, step, kind, refusals)
            used = sum(drive.load().used for drive in self._drives)
            self._peak = max(self._peak, used)
        if record is None:
            free = max(0, self._capacity - used)
            advice = f"no drive takes it: {'; '.join(dict.fromkeys(refusals))}"
            raise TierFull("disk", needed=nbytes, free=free, used=used, limit=self._capacity, advice=advice)
        return record

    def read(self, record: PlacedRecord, wanted: Sequence[tuple[int, int]]) -> Job:
        """Begin to read pieces of a record. See `DiskTier`; it raises the same errors."""
        return record.drive.read(record.on_drive, wanted)

    def release(self, record: PlacedRecord) -> None:
        """Nobody needs the record. See `DiskTier`."""
        record.drive.release(record.on_drive)

    def stats(self) -> TierStats:
        """Return the sums of this moment. `state` is the worst that a drive has."""
        each = [drive.stats() for drive in self._drives]
        states = {stats.state for stats in each}
        return TierStats(
            self._capacity,
            direct=all(stats.direct for stats in each),
            used=sum(stats.used for stats in each),
            reserved=sum(stats.reserved for stats in each),
            peak=self._peak,
            records=sum(stats.records for stats in each),
            files=sum(stats.files for stats in each),
            written=sum(stats.written for stats in each),
            read=sum(stats.read for stats in each),
            failures=sum(stats.failures for stats in each),
            state=next(state for state in _STATES if state in states),
            drives=len(each),
        )

    def watch(self, watcher: Watcher) -> None:
        """Have `watcher` called for each operation of any drive that ends from now on."""
        for drive in self._drives:
            drive.watch(watcher)

    def close(self) -> None:
        """Close all drives. Idempotent."""
        with contextlib.ExitStack() as closing:
            for drive in self._drives:
                closing.callback(drive.close)

    def _accept(self, nbytes: int) -> bool:
        return any(drive.accepts(nbytes) for drive in self._drives)

    def _place(
        self, pieces: Sequence[Piece], nbytes: int, step: int, kind: str, refusals: list[str]
    ) -> PlacedRecord | None:
        """Begins to write on the best drive that takes it. None if none does: `refusals` says why."""
        for drive in self._ranked(nbytes):
            try:
                return PlacedRecord(drive, drive.write(pieces, step=step, kind=kind))
            except TierFull as error:
                refusals.append(str(error))
        return None

    def _ranked(self, nbytes: int) -> list[DiskTier]:
        """The drives in the order in which they are to be asked to take so many bytes."""
        loads = [drive.load() for drive in self._drives]
        fastest = max((load.rate for load in loads if load.rate is not None), default=1.0)
        rates = [fastest if load.rate is None else load.rate for load in loads]
        through = [(load.under_way + nbytes) / rate for load, rate in zip(loads, rates, strict=True)]
        read_back = [load.used / rate for load, rate in zip(loads, rates, strict=True)]
        # One that failed is tried with a single record, before more are sent after it.
        tried = [load.failing and load.under_way > 0 for load in loads]
        soonest = min(seconds for seconds, wait in zip(through, tried, strict=True) if not wait or all(tried))

        def rank(number: int) -> tuple[bool, bool, float, int]:
            late = through[number] > soonest + _ALIKE * nbytes / rates[number]
            turn = (number - self._first) % len(loads)
            return tried[number], late, through[number] if late else read_back[number], turn

        return [self._drives[number] for number in sorted(range(len(loads)), key=rank)]

    def _make_room(self, nbytes: int) -> bool:
        """Removes files that wait to be used again, where they take the room that all drives share.

        Whether there were any. A drive uses its own again, and so this is for one that takes another's part.
        """
        each = [drive.stats() for drive in self._drives]
        needed = ALIGNMENT + nbytes
        used, reserved = sum(stats.used for stats in each), sum(stats.reserved for stats in each)
        short = used + needed <= self._capacity < reserved + needed
        if not short or all(stats.state != "ok" for stats in each):
            return False
        for drive in self._drives:
            drive.remove_free()
        return True

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Takes the lock, but not in a forked child, where nobody might free it. Raises Closed there."""
        if os.getpid() != self._pid:
            raise Closed("the disk tier is that of the process that forked this")
        with self._lock:
            yield


@dataclass(frozen=True, slots=True, eq=False)
class PlacedRecord:
    """A record, and the drive that has it."""

    drive: DiskTier
    on_drive: DiskRecord

    @property
    def job(self) -> Job:
        """The write. Once it is done without an error, the record is on the drive."""
        return self.on_drive.job

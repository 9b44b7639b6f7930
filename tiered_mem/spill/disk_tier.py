"""The disk tier: takes records from memory and gives them back, within a limit of bytes."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, NamedTuple

from ..allocators.base import round_up
from ..errors import Closed, TierFull
from ..sizes import format_bytes
from .file_pool import Claim, FilePool, SpillFile
from .filesystem import Files
from .folder import SpillFolder
from .io_queue import Drive, IoQueue, Queue
from .lower_tier import Job, Piece, TierStats, Watcher
from .pace import Pace
from .record import ALIGNMENT, Entry, Header, Layout, check_address
from .record_io import RecordIo, checksum_by_name
from .room import Room
from .write_gate import WriteBudget, WriteGate

SMALLEST_RECORD = 2 * ALIGNMENT

_log = logging.getLogger("tiered_mem.spill")


class DiskTier:
    """Records in the files of a private folder below `spill_dir`.

    Operations go on by themselves, on `workers` threads, reads before writes. Only `close` waits for the drive.
    Every method may be called from any thread. In a forked child all of them raise Closed or do nothing.

    A read gives what was written, or its job has an error. A failed write costs only time, as long as the caller
    keeps the memory until the job is done without an error. Writing then pauses for 1 s, twice as long each time,
    up to 60 s.

    capacity: the bytes that all files together may take; None is half of what is free.
    write_budget: the bytes that may be written in all, as drives wear out. Tiers may share a `WriteBudget`.
    room: the bytes that this and other tiers may take together. A capacity beyond what is free is that, then.
    checksum: "xxh3_64", "crc32", "none", or None for the fastest there is.
    drive: a model that says how long operations take; None is the real one.
    files, clock: for tests.

    now: the seconds of the drive's clock, which is that of time.perf_counter for a real one.

    Raises SpillDirRefused, ValueError for a capacity that holds no record or that the file system does not have,
    and the errors of `checksum_by_name`.
    """

    def __init__(
        self,
        spill_dir: str | os.PathLike[str],
        *,
        capacity: int | None = None,
        write_budget: int | WriteBudget | None = None,
        room: Room | None = None,
        checksum: str | None = None,
        workers: int = 4,
        drive: Drive | None = None,
        files: Files | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        if capacity is not None and capacity < SMALLEST_RECORD:
            raise ValueError(f"capacity is {capacity} bytes; the smallest record takes {SMALLEST_RECORD}")
        self._checksum = checksum_by_name(checksum)
        self._os = files or Files()
        if drive is not None:
            self._os = drive.files(self._os)
        self._run = uuid.uuid4().hex[:12]
        self._folder = folder = SpillFolder(spill_dir, run=self._run, files=self._os)
        try:
            # What other processes have of the room may come to be this one's.
            free = folder.free_bytes() + (0 if room is None else room.used())
            if capacity is None:
                capacity = free // 2
            if room is not None:
                capacity = min(capacity, free)
            if not SMALLEST_RECORD <= capacity <= free:
                raise ValueError(
                    f"capacity is {format_bytes(capacity)}, and the file system of {os.fspath(spill_dir)} has "
                    f"{format_bytes(free)} left; lower spill_bytes, or make room"
                )
            self._direct = folder.takes_direct_io()
            threads = IoQueue(workers, "tiered_mem-disk")
        except BaseException:
            folder.close()
            raise
        self._queue: Queue = threads if drive is None else drive.queue(threads)
        self.now = self._queue.now
        self._files = FilePool(folder, self._os, capacity=capacity, direct=self._direct, room=room)
        budget = write_budget if isinstance(write_budget, WriteBudget) else WriteBudget(write_budget)
        self._gate = WriteGate(budget, clock or self.now)
        self._pace = Pace()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        self._stats = TierStats(capacity, self._direct)
        self._watchers: tuple[Watcher, ...] = ()
        self._end = weakref.finalize(self, _end, self._queue, folder, self._pid)

    def accepts(self, nbytes: int) -> bool:
        """Whether `write` would begin to write `nbytes` now, the sum of pieces that are each rounded up to 4096.

        The header of hundreds of pieces takes more than 4096 bytes, and then `write` may refuse nevertheless.
        """
        if not self._is_open():
            return False
        with self._lock:
            refusal = self._refusal(ALIGNMENT + round_up(nbytes))
        self._tell(refusal)
        return refusal is None

    def write(self, pieces: Sequence[Piece], *, step: int, kind: str) -> DiskRecord:
        """Begin to write a record. The memory must stay as it is until the record's job is done.

        step, kind: notes for people who look into the file; see `Header`.

        Raises TierFull where `accepts` is False, ValueError for pieces that no record can have, and Closed.
        """
        pieces = tuple(pieces)
        for piece in pieces:
            check_address(piece.ptr)
        entries = tuple(Entry(piece.name, piece.dtype, piece.nbytes) for piece in pieces)
        number = next(self._numbers)
        header = Header(self._run, number, number, step, kind, self._checksum.name, entries)
        layout = header.layout()
        with self._locked():
            refusal = self._refusal(layout.file_bytes)
            if refusal is None:
                record = DiskRecord(header, layout, self._files.claim(layout.file_bytes))
                try:
                    attempt = self._gate.begin(record.cost)
                except TierFull:
                    self._files.cancel(record.claim)
                    raise
                self._add(record)
                io = RecordIo(self._os, self._checksum, self._direct, record.header, record.layout)
                work = partial(self._write, io, record, pieces, attempt)
                record.job = self._submit("write", work, io, record.nbytes)
                return record
        self._tell(refusal)
        try:
            raise refusal
        finally:
            del refusal  # or it and this frame would keep each other alive, and with them the caller's

    def read(self, record: DiskRecord, wanted: Sequence[tuple[int, int]]) -> Job:
        """Begin to read pieces of a record that is written: the index of each, and the address that it goes to.

        The memory belongs to the operation until the job is done, up to the next multiple of 4096 behind each
        piece. Its contents are undefined if the job ends with an error: CorruptRecord where the file does not hold
        what was written, or OSError.

        Raises ValueError for a record that is not written or was released, an index that it does not have, or an
        address that is no multiple of 4096, and Closed.
        """
        wanted = tuple(wanted)
        with self._locked():
            if record.released or record.file is None:
                why = "was released" if record.released else "has not been written: look at its job"
                raise ValueError(f"record {record.number} {why}")
            count = len(record.header.entries)
            for index, ptr in wanted:
                check_address(ptr)
                if not 0 <= index < count:
                    raise ValueError(f"record {record.number} has {count} pieces, and none of index {index}")
            record.operations += 1
            nbytes = record.layout.header_bytes
            nbytes += sum(round_up(record.header.entries[index].nbytes) for index, _ in wanted)
            io = RecordIo(self._os, self._checksum, self._direct, record.header, record.layout)
            return self._submit("read", partial(self._read, io, record, record.file, wanted), io, nbytes)

    def release(self, record: DiskRecord) -> None:
        """Nobody needs the record. Its file is used again when no operation needs it any more. Idempotent.

        A write that has not begun is cancelled, and its job is done at once. One that has begun reads the memory
        until its job is done.
        """
        if not self._is_open():
            return
        with self._lock:
            record.released = True
            self._remove(record)
            if self._queue.cancel(record.job):
                self._gate.cancel(record.cost)
                self._pace.give_up(record.nbytes)
                self._files.cancel(record.claim)
            else:
                self._free_unneeded(record)

    def stats(self) -> TierStats:
        """Return the counters of this moment."""
        with self._lock:
            reserved, files = self._files.usage()
            written, state = self._gate.written, self._gate.state
            return replace(self._stats, reserved=reserved, files=files, written=written, state=state)

    def load(self) -> DriveLoad:
        """Return what to place records by."""
        with self._lock:
            failing = self._gate.state == "failing"
            return DriveLoad(self._pace.under_way, self._pace.rate, self._stats.used, failing)

    def remove_free(self) -> None:
        """Remove the files that no record needs, which other tiers may need the room of. Waits for the drive."""
        if self._is_open():
            self._files.remove_free()

    def watch(self, watcher: Watcher) -> None:
        """Have `watcher` called for each operation that ends from now on, by the thread that did it."""
        with self._lock:
            self._watchers += (watcher,)

    def close(self) -> None:
        """End the threads and remove the folder, after the reads and the writes that are under way.

        Writes that have not begun are cancelled. Idempotent.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
        _end(self._queue, self._folder, self._pid)
        self._end.detach()

    def _write(self, io: RecordIo, record: DiskRecord, pieces: Sequence[Piece], attempt: int) -> None:
        try:
            with self._files.writing(record.claim) as file:
                header, encoded = io.write(file.fd, pieces, reused=file.identity is not None)
        except BaseException as error:
            with self._lock:
                news = self._gate.failed(attempt, record.cost, io.moved, error)
                self._stats.failures += 1
                self._remove(record)
                self._files.cancel(record.claim)
            if news:
                _log.warning(
                    "writing to %s failed: %s. What is not there stays in memory. Writing is tried again from time "
                    "to time; the next word of it comes when it works",
                    *(self._folder.path, str(error)),
                )
            raise
        with self._lock:
            news = self._gate.succeeded(attempt, record.cost, io.moved)
            record.header, record.encoded, record.file = header, encoded, file
            record.operations -= 1
            self._free_unneeded(record)
        if news:
            _log.warning("writing to %s works again", self._folder.path)

    def _read(self, io: RecordIo, record: DiskRecord, file: SpillFile, wanted: Sequence[tuple[int, int]]) -> None:
        sound = False
        try:
            with self._files.reading(file) as fd:
                io.read(fd, record.encoded, wanted, self._files.path(file))
            sound = True
        finally:
            with self._lock:
                self._stats.read += io.moved
                self._stats.failures += not sound
                record.sound = record.sound and sound
                record.operations -= 1
                self._free_unneeded(record)

    def _submit(self, kind: Literal["read", "write"], work: Callable[[], None], io: RecordIo, nbytes: int) -> Job:
        self._pace.begin(nbytes)
        told = partial(self._ended, kind, io, nbytes)
        return self._queue.submit(work, urgent=kind == "read", nbytes=nbytes, told=told)

    def _ended(self, kind: Literal["read", "write"], io: RecordIo, nbytes: int, began: float, ended: float) -> None:
        self._pace.end(nbytes, io.moved, began, ended)
        for watcher in self._watchers:
            watcher(kind, io.moved, began, ended)

    def _add(self, record: DiskRecord) -> None:
        self._stats.used += record.nbytes
        self._stats.peak = max(self._stats.peak, self._stats.used)
        self._stats.records += 1

    def _remove(self, record: DiskRecord) -> None:
        """The record was released, or not written. Idempotent."""
        if record.counted:
            record.counted = False
            self._stats.used -= record.nbytes
            self._stats.records -= 1

    def _free_unneeded(self, record: DiskRecord) -> None:
        """Frees the file of a released record, once no operation needs it."""
        if record.released and record.operations == 0 and record.file is not None:
            self._files.free(record.file, sound=record.sound)
            record.file = None

    def _refusal(self, file_bytes: int) -> TierFull | None:
        """The error for a write that may not begin now; None if it may."""
        available = self._files.available()
        advice = self._gate.refusal(file_bytes + ALIGNMENT)
        if advice is None and file_bytes > available:
            advice = self._files.advice(file_bytes)
        return None if advice is None else self._files.full(file_bytes, available, advice)

    def _tell(self, refusal: TierFull | None) -> None:
        if refusal is None:
            return
        with self._lock:
            news = self._gate.budget_news()
        if news:
            _log.warning("what should go to %s stays in memory from now on: %s", self._folder.path, str(refusal))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Takes the lock of an open tier. Raises Closed. A forked child does not touch it: nobody might free it."""
        self._check_open()
        with self._lock:
            self._check_open()
            yield

    def _is_open(self) -> bool:
        return not self._closed and os.getpid() == self._pid

    def _check_open(self) -> None:
        if not self._is_open():
            raise Closed(f"the disk tier in {self._folder.path} is closed, or that of the process that forked this")


class DriveLoad(NamedTuple):
    """What a tier has to do and has. under_way: see `Pace`. rate: in bytes per second, or None before it is known.

    used: the bytes of its records. failing: as in `TierStats`.
    """

    under_way: int
    rate: float | None
    used: int
    failing: bool


@dataclass(slots=True, eq=False)
class DiskRecord:
    """One file's worth of memory, on its way to the drive or there.

    header: without checksums until it is written. job: the write; once it is done without an error, the record is
    on the drive. The rest is the tier's.
    """

    header: Header
    layout: Layout
    claim: Claim
    job: Job = field(init=False)
    encoded: bytes = b""
    file: SpillFile | None = None
    operations: int = 1
    counted: bool = True
    released: bool = False
    sound: bool = True

    @property
    def number(self) -> int:
        """No other record of the tier has it."""
        return self.header.number

    @property
    def nbytes(self) -> int:
        """The size of its file."""
        return self.layout.file_bytes

    @property
    def cost(self) -> int:
        """The most bytes that writing it takes, with the zeros that first end the older record in its file."""
        return self.nbytes + ALIGNMENT


def _end(queue: Queue, folder: SpillFolder, pid: int) -> None:
    # The threads are the parent's, and a lock in a child may be held by one of them for ever.
    if os.getpid() == pid:
        queue.close()
        folder.close()

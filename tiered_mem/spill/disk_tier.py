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
from importlib.metadata import entry_points
from typing import Literal

from ..allocators.base import round_up
from ..errors import Closed, TierFull
from ..ground.arguments import with_methods
from ..sizes import format_bytes, parse_bytes
from .file_pool import Claim, FilePool, SpillFile
from .filesystem import Files
from .folder import SpillFolder
from .io_queue import Drive, IoQueue, Queue
from .lower_tier import METHODS, Job, LowerTier, Piece, State, TierStats, Watcher
from .record import ALIGNMENT, Entry, Header, Layout, check_address
from .record_io import RecordIo, checksum_by_name

SMALLEST_RECORD = 2 * ALIGNMENT

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0

_log = logging.getLogger("tiered_mem.spill")


class DiskTier:
    """Records in the files of a private folder below `spill_dir`.

    Operations go on by themselves, on `workers` threads, reads before writes. Only `close` waits for the drive.
    Every method may be called from any thread. In a forked child all of them raise Closed or do nothing.

    A read gives what was written, or its job has an error. A failed write costs only time, as long as the caller
    keeps the memory until the job is done without an error. Writing then pauses for 1 s, twice as long each time,
    up to 60 s.

    capacity: the bytes that all files together may take; None is half of what is free.
    write_budget: the bytes that may be written in all, as drives wear out.
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
        write_budget: int | None = None,
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
            free = folder.free_bytes()
            if capacity is None:
                capacity = free // 2
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
        self._files = FilePool(folder, self._os, capacity=capacity, direct=self._direct)
        self._gate = WriteGate(write_budget, clock or self.now)
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
                self._add(record)
                attempt = self._gate.begin(record.cost)
                io = RecordIo(self._os, self._checksum, self._direct, record.header, record.layout)
                work, told = partial(self._write, io, record, pieces, attempt), partial(self._ended, "write", io)
                record.job = self._queue.submit(work, urgent=False, nbytes=record.nbytes, told=told)
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
            work, told = partial(self._read, io, record, record.file, wanted), partial(self._ended, "read", io)
            return self._queue.submit(work, urgent=True, nbytes=nbytes, told=told)

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
                self._files.cancel(record.claim)
            else:
                self._free_unneeded(record)

    def stats(self) -> TierStats:
        """Return the counters of this moment."""
        with self._lock:
            reserved, files = self._files.usage()
            written, state = self._gate.written, self._gate.state
            return replace(self._stats, reserved=reserved, files=files, written=written, state=state)

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

    def _ended(self, kind: Literal["read", "write"], io: RecordIo, began: float, ended: float) -> None:
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
            advice = "raise spill_bytes, or offload less"
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


class WriteGate:
    """Counts written bytes, and pauses writing after a failure: for 1 s, then twice as long each time, up to 60 s.

    Each write that begins gets the number of its attempt, and hands it back at its end. Of writes that were under
    way together only the first failure counts, and only a write that began after it shows that all is well again.
    Not thread-safe.

    budget: the bytes that may ever be written, or None. clock: seconds.
    """

    def __init__(self, budget: int | None, clock: Callable[[], float]) -> None:
        self._budget = budget
        self._clock = clock
        self._promised = 0
        self._spent = False
        self._told = False
        self._pause = self._until = 0.0
        self._attempt = 0
        self._error = ""
        self.written = 0

    @property
    def state(self) -> State:
        """As in `TierStats`."""
        return "budget spent" if self._spent else "failing" if self._pause else "ok"

    def refusal(self, nbytes: int) -> str | None:
        """The reason why a write of `nbytes` may not begin now, with advice; None if it may."""
        total = self.written + self._promised + nbytes
        self._spent = self._budget is not None and total > self._budget
        if self._budget is not None and self._spent:
            return (
                f"of the write budget of {format_bytes(self._budget)}, {format_bytes(total - nbytes)} are spent; "
                "raise it if the drive may wear more"
            )
        if self._pause and (left := self._until - self._clock()) > 0:
            return f"writing is tried again in {left:.1f} s, as it failed: {self._error}"
        return None

    def budget_news(self) -> bool:
        """Whether the budget was too small for the first time."""
        news = self._spent and not self._told
        self._told = self._told or news
        return news

    def begin(self, nbytes: int) -> int:
        """A write of at most `nbytes` begins. Returns the number of its attempt."""
        self._promised += nbytes
        return self._attempt

    def cancel(self, nbytes: int) -> None:
        """A write of at most `nbytes` was cancelled before it began."""
        self._promised -= nbytes

    def succeeded(self, attempt: int, nbytes: int, written: int) -> bool:
        """A write of at most `nbytes` has written `written`. Returns whether that ends a pause."""
        self._count(nbytes, written)
        news = self._pause > 0 and attempt == self._attempt
        if news:
            self._pause = 0.0
        return news

    def failed(self, attempt: int, nbytes: int, written: int, error: BaseException) -> bool:
        """A write of at most `nbytes` has failed after `written`. Returns whether writing worked before."""
        self._count(nbytes, written)
        if attempt != self._attempt:
            return False
        news = not self._pause
        self._attempt += 1
        self._pause = min(2 * self._pause or _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self._until = self._clock() + self._pause
        self._error = str(error) or type(error).__name__
        return news

    def _count(self, promised: int, written: int) -> None:
        self._promised -= promised
        self.written += written


def chosen_tier(
    spill_dir: str | os.PathLike[str] | None,
    spill_bytes: int | str | None,
    spill_write_budget: int | str | None,
    spill_checksum: str | None,
    disk: LowerTier | None,
) -> LowerTier | None:
    """The tier below the host, if there is one. Arguments and errors are those of TieringManager."""
    described = (spill_dir, spill_bytes, spill_write_budget, spill_checksum) != (None, None, None, None)
    if disk is not None:
        if described:
            raise ValueError("disk comes in place of the arguments that begin with spill: give either it or these")
        with_methods("disk", disk, METHODS)
        return disk
    if spill_dir is None:
        if described:
            raise ValueError("what begins with spill describes a disk tier, which needs a spill_dir as well")
        return None
    return DiskTier(
        spill_dir,
        capacity=None if spill_bytes is None else parse_bytes(spill_bytes, "spill_bytes"),
        write_budget=None if spill_write_budget is None else parse_bytes(spill_write_budget, "spill_write_budget"),
        checksum=spill_checksum,
        drive=offered_drive(),
    )


def offered_drive() -> Drive | None:
    """The first drive that an installed package offers to this process, by an entry point "tiered_mem.drives".

    That is a function without arguments; it returns None where there is nothing to be modelled.
    """
    offers = (entry.load()() for entry in entry_points(group="tiered_mem.drives"))
    return next((drive for drive in offers if drive is not None), None)


def _end(queue: Queue, folder: SpillFolder, pid: int) -> None:
    # The threads are the parent's, and a lock in a child may be held by one of them for ever.
    if os.getpid() == pid:
        queue.close()
        folder.close()

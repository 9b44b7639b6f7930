"""The file by which a job's managers on one machine know of each other: a record for each, kept by a lock."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import stat
import struct
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

# A record has so many numbers of 8 bytes. The first is the owner's process, and 0 where there is none. The last one
# stays when a record gets its next owner.
RECORD = 20
PID, LASTING = 0, RECORD - 1
_RECORDS = 255
# Before the records: how often somebody was refused, and how many records were ever in use.
WANTS, _MOST = 0, 1
_BYTES = 8 * RECORD * (1 + _RECORDS)

# The bytes that are locked, which need not have to do with what is in them. Of record n it is byte n.
_MUTEX, _FIRST = 0, 1
_FLOCK = struct.Struct("hhqqi4x")
_NAME = re.compile(r"[0-9a-f]{16}")
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


class NodeFile:
    """Numbers that processes share, in records that each have one owner.

    A record is its owner's as long as the kernel holds a lock for it: until `close`, or until the process ends,
    however it ends. Who looks next finds a dead one's record free. Only the owner writes in its record, and each
    number as a whole, so that a process may be killed anywhere. No process waits for another, but for the time that
    `exclusive` takes.

    A forked child has no part in it: there the file is closed, and the child does not keep the record.

    folder: is made where it is missing, for this user alone. Files in it of which no process lives are removed.
    job: 16 hexadecimal digits; processes that say the same share a file.

    Attributes:
        numbers: Of all records, and what comes before these. Reading them takes no lock, and may find numbers of
            the dead.
        place: Where in `numbers` the own record begins.

    Raises OSError: there is no room for the file, the folder is not this user's, or the system lacks such locks.
    """

    def __init__(self, folder: Path, job: str) -> None:
        self._threads = threading.RLock()
        self.place = 0
        self._fd = _opened(folder, job)
        try:
            # A page for which there is no room would end the process when it is written to.
            os.posix_fallocate(self._fd, 0, _BYTES)
            memory = mmap.mmap(self._fd, _BYTES)
        except BaseException:
            os.close(self._fd)
            raise
        self.numbers = memoryview(memory).cast("Q")
        self._end = weakref.finalize(self, _close, self.numbers, memory, self._fd)
        self._end.atexit = False
        try:
            with self.exclusive():  # as it is since the file was opened
                if not _held(self._fd, _FIRST, _RECORDS):
                    memory[:] = bytes(_BYTES)
                self.place = self._claimed()
        except BaseException:
            self.close()
            raise
        this = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _leave_to_the_parent(this()))

    @property
    def closed(self) -> bool:
        return not self._end.alive

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """While it is entered no other process and no other thread is. It is for a few microseconds."""
        with self._threads:
            try:
                _lock(self._fd, _MUTEX, wait=True)
                yield
            finally:
                _unlock(self._fd, _MUTEX)

    def known(self) -> list[int]:
        """Where the records begin that have an owner, or one that has died since somebody looked."""
        numbers = self.numbers
        return [place for place in self.used() if numbers[place + PID]]

    def living(self) -> list[int]:
        """Where the records begin whose owners live. Those of the dead are free then. Only in `exclusive`."""
        alive = []
        for place in self.known():
            if place == self.place or _held(self._fd, place // RECORD):
                alive.append(place)
            else:
                self.numbers[place + PID] = 0
        return alive

    def look(self) -> None:
        """Looks who is alive, so that `known` has nobody else."""
        if not self.closed:
            with self.exclusive():
                self.living()

    def used(self) -> range:
        """Where the records begin that anybody ever had."""
        return range(RECORD, RECORD * (1 + self.numbers[_MOST]), RECORD)

    def close(self) -> None:
        """Give the record up. Idempotent.

        Not in `exclusive`, which another file's owner may be in when the collector has this one closed.
        """
        with self._threads:
            if self._end.alive and self.place:
                self.numbers[self.place + PID] = 0
            self._end()

    def _claimed(self) -> int:
        """The place of a record that is this one's from now on."""
        self.living()
        for number in range(1, 1 + _RECORDS):
            place = number * RECORD
            if not self.numbers[place + PID] and _lock(self._fd, number):
                for each in range(place, place + LASTING):
                    self.numbers[each] = 0
                self.numbers[_MOST] = max(self.numbers[_MOST], number)
                self.numbers[place + PID] = os.getpid()
                return place
        raise OSError(errno.ENOSPC, f"{_RECORDS} managers of this job are on this machine, and there is no record")


def _opened(folder: Path, job: str) -> int:
    """The job's file, locked by the mutex. Files of dead jobs are gone."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    within = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(within)
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise PermissionError(errno.EACCES, f"{folder} is not this user's alone", str(folder))
        _sweep(within, job)
        while True:
            fd = os.open(job, _FLAGS | os.O_CREAT, 0o600, dir_fd=within)
            try:
                _lock(fd, _MUTEX, wait=True)
                # Another process may have swept it before it was locked.
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(fd), os.stat(job, dir_fd=within, follow_symlinks=False)):
                        return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
    finally:
        os.close(within)


def _sweep(folder: int, job: str) -> None:
    """Removes the files of other jobs of which no process lives."""
    for name in os.listdir(folder):
        if name == job or not _NAME.fullmatch(name):
            continue
        with contextlib.suppress(OSError):
            fd = os.open(name, _FLAGS, dir_fd=folder)
            try:
                if _lock(fd, _MUTEX) and not _held(fd, _FIRST, _RECORDS):
                    os.unlink(name, dir_fd=folder)
            finally:
                os.close(fd)


def _lock(fd: int, byte: int, *, wait: bool = False) -> bool:
    """Whether the byte is locked now, by this open file: another one of this process is as good as a stranger's."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK, byte))
    except BlockingIOError:
        return False
    return True


def _unlock(fd: int, byte: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, byte))


def _held(fd: int, byte: int, count: int = 1) -> bool:
    """Whether any of the bytes is locked by another open file."""
    found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, byte, count))
    return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)


def _flock(kind: int, byte: int, count: int = 1) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, byte, count, 0)


def _close(numbers: memoryview, memory: mmap.mmap, fd: int) -> None:
    numbers.release()
    memory.close()  # it has a copy of the descriptor
    os.close(fd)


def _leave_to_the_parent(file: NodeFile | None) -> None:
    """In a forked child: a lock lasts until all copies of the open file are closed."""
    if file is not None:
        file._end()

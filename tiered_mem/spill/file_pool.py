"""Keeps the files of a spill folder within a limit of bytes, and uses them again."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from ..errors import CorruptRecord, TierFull
from .filesystem import Files
from .folder import SpillFolder
from .room import Room

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
# What opening says where there is no file, or something that is none; EINVAL of a pipe, with direct I/O.
_TAKEN_AWAY = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EINVAL)
_nbytes = attrgetter("nbytes")


class FilePool:
    """Makes files, uses them again, and removes unneeded ones where room is short.

    Their lengths never add up to more than `capacity` bytes: room is claimed before a file grows, and freed after
    it has shrunk or is gone. Only `writing` and `reading` wait for the drive, and they hold no lock.

    direct: open the files for direct I/O.
    room: what several pools may take together; None is no less than `capacity`.
    """

    def __init__(
        self, folder: SpillFolder, files: Files, *, capacity: int, direct: bool, room: Room | None = None
    ) -> None:
        self._folder = folder
        self._files = files
        self._capacity = capacity
        self._flags = os.O_DIRECT if direct else 0
        self._room = room or Room(capacity)
        self._lock = self._room.lock
        self._numbers = itertools.count()
        # Files of no record: those that can be used again, from the smallest to the largest, and those that cannot.
        self._usable: list[SpillFile] = []
        self._unusable: list[SpillFile] = []
        self._free_bytes = 0  # of both
        self._reserved = 0
        self._count = 0

    def available(self) -> int:
        """The bytes that a claim could get now."""
        with self._lock:
            return self._available()

    def usage(self) -> tuple[int, int]:
        """The bytes of all files and of all claims, and how many files there are."""
        with self._lock:
            return self._reserved, self._count

    def claim(self, nbytes: int) -> Claim:
        """Room for a file of `nbytes`: a free file, others to remove, and more of the drive. Raises TierFull."""
        with self._lock:
            room = self._reserve(max(0, nbytes - (self._usable[-1].nbytes if self._usable else 0)))
            if nbytes > room + self._free_bytes:
                self._give(room)
                raise self.full(nbytes, self._available(), self.advice(nbytes))
            claim = Claim(nbytes, self._best(nbytes), self._unusable)
            self._unusable = []
            self._free_bytes -= claim.to_drop()
            while claim.growth() > room + claim.to_drop():
                claim.drop.append(self._take(-1))
            claim.extra = min(claim.growth(), room)
            self._give(room - claim.extra)
            return claim

    def cancel(self, claim: Claim) -> None:
        """Free a claim whose write did not happen, or failed."""
        with self._lock:
            self._free_rest(claim)
            if claim.reused is not None:
                self._free(claim.reused, sound=True)

    def free(self, file: SpillFile, *, sound: bool) -> None:
        """Nobody needs the file's record. A sound file is used again, another one is removed by the next claim."""
        with self._lock:
            self._free(file, sound=sound)

    def remove_free(self) -> bool:
        """Remove the files that nobody needs, also for the sake of other pools. Return whether there were any.

        Those that cannot be removed stay.
        """
        with self._lock:
            claim = Claim(0, None, self._unusable)
            self._unusable = []
            self._free_bytes -= claim.to_drop()
            claim.drop += [self._take(0) for _ in range(len(self._usable))]
        found = bool(claim.drop)
        self._remove(claim)
        self.cancel(claim)
        return found

    @contextlib.contextmanager
    def writing(self, claim: Claim) -> Iterator[SpillFile]:
        """An open file of the claimed size.

        After an error, here or in the caller's block, the file is removed and the caller has to cancel the claim.
        Raises OSError, and TierFull where the file system has no room.
        """
        file = None
        try:
            self._remove(claim)
            file = self._reused(claim) or self._created()
            self._resize(file, claim)
            yield file
            file.identity = self._identity(file.fd)
            self._close(file)
        except BaseException as error:
            if file is not None:
                with contextlib.suppress(OSError):
                    self._close(file)
                claim.drop.append(file)
                self._remove(claim)
            if isinstance(error, OSError) and error.errno in _NO_ROOM:
                raise self._no_room(claim, error) from error
            raise
        with self._lock:
            self._free_rest(claim)

    @contextlib.contextmanager
    def reading(self, file: SpillFile) -> Iterator[int]:
        """A descriptor of a file that was written.

        Raises CorruptRecord where the file is gone, or is not the one that was written, and OSError.
        """
        fd = self._open(file, write=False)
        try:
            yield fd
        finally:
            with contextlib.suppress(OSError):
                self._files.close(fd)

    def path(self, file: SpillFile) -> str:
        return str(self._folder.path / file.name)

    def full(self, needed: int, free: int, advice: str, but: int = 0) -> TierFull:
        """The error for a lack of room. but: claimed bytes that do not count as used."""
        used = self._reserved - self._free_bytes - but
        return TierFull("disk", needed=needed, free=free, used=used, limit=self._capacity, advice=advice)

    def advice(self, nbytes: int) -> str:
        """What helps where there is no room for a file of `nbytes`."""
        return self._room.advice(nbytes - self._free_bytes)

    # Bytes, under the lock.

    def _available(self) -> int:
        return self._left() + self._free_bytes

    def _left(self) -> int:
        """What no file and no claim has, here and in the room that is shared."""
        return min(self._capacity - self._reserved, self._room.left())

    def _reserve(self, nbytes: int) -> int:
        """Sets as many of the bytes aside as there are. Returns how many."""
        nbytes = min(nbytes, self._left())
        if nbytes <= 0 or not self._room.take(nbytes):
            return 0  # or others were quicker
        self._reserved += nbytes
        return nbytes

    def _give(self, nbytes: int) -> None:
        self._reserved -= nbytes
        self._room.give(nbytes)

    def _best(self, nbytes: int) -> SpillFile | None:
        """Takes the smallest usable file of that size or more, else the largest; None if there is none."""
        if not self._usable:
            return None
        return self._take(min(bisect_left(self._usable, nbytes, key=_nbytes), len(self._usable) - 1))

    def _take(self, index: int) -> SpillFile:
        file = self._usable.pop(index)
        self._free_bytes -= file.nbytes
        return file

    def _free(self, file: SpillFile, *, sound: bool) -> None:
        if sound:
            insort(self._usable, file, key=_nbytes)
        else:
            self._unusable.append(file)
        self._free_bytes += file.nbytes

    def _free_rest(self, claim: Claim) -> None:
        """Frees the bytes of a claim that its file did not take."""
        self._give(claim.extra)
        claim.extra = 0
        for file in claim.drop:
            self._free(file, sound=False)
        claim.drop.clear()

    # Files, without the lock.

    def _reused(self, claim: Claim) -> SpillFile | None:
        file, claim.reused = claim.reused, None
        if file is None:
            return None
        try:
            file.fd = self._open(file, write=True)
            return file
        except OSError:
            # Whatever is wrong with it, a new one will do.
            claim.drop.append(file)
            self._remove(claim)
            return None

    def _created(self) -> SpillFile:
        file = SpillFile(f"{next(self._numbers):06d}.safetensors")
        file.fd = self._folder.create(file.name, self._flags)
        with self._lock:
            self._count += 1
        return file

    def _open(self, file: SpillFile, *, write: bool) -> int:
        """Opens a finished file. Raises OSError, and CorruptRecord where another file, or none, has its name."""
        try:
            fd = self._folder.open(file.name, self._flags, write=write)
        except OSError as error:
            if error.errno not in _TAKEN_AWAY:
                raise
            found = error.strerror
            raise CorruptRecord(self.path(file), "the file", expected=file.identity, found=found) from error
        try:
            identity = self._identity(fd)
            if identity != file.identity:
                raise CorruptRecord(self.path(file), "another file", expected=file.identity, found=identity)
        except BaseException:
            with contextlib.suppress(OSError):
                self._files.close(fd)
            raise
        return fd

    def _identity(self, fd: int) -> Identity:
        found = self._files.stat(fd)
        return Identity(found.st_dev, found.st_ino, found.st_uid, found.st_nlink, found.st_size)

    def _close(self, file: SpillFile) -> None:
        fd, file.fd = file.fd, -1
        if fd >= 0:
            self._files.close(fd)

    def _resize(self, file: SpillFile, claim: Claim) -> None:
        growth = claim.nbytes - file.nbytes
        if growth < 0:
            self._files.truncate(file.fd, claim.nbytes)
        with self._lock:
            # What was to be dropped, and could not be, is missing here.
            more = max(0, growth - claim.extra)
            free = self._left()
            if (got := self._reserve(more)) < more:
                self._give(got)
                raise self.full(more, free, f"files in {self._folder.path} cannot be removed: see its permissions")
            claim.extra -= max(0, growth) - more
            self._give(max(0, -growth))
            file.nbytes = claim.nbytes
        if growth > 0:
            self._allocate(file, claim.nbytes)

    def _allocate(self, file: SpillFile, nbytes: int) -> None:
        try:
            self._files.allocate(file.fd, nbytes)
        except OSError as error:
            # Somebody else has filled the drive. What is kept here for later may make the room.
            if error.errno not in _NO_ROOM or not self.remove_free():
                raise
            self._files.allocate(file.fd, nbytes)

    def _remove(self, claim: Claim) -> None:
        """Removes the files that a claim has to drop, and gives it their bytes. Others stay in the claim."""
        for file in tuple(claim.drop):
            try:
                self._folder.remove(file.name)
            except FileNotFoundError:
                pass
            except OSError:
                continue
            with self._lock:
                claim.drop.remove(file)
                claim.extra += file.nbytes
                self._count -= 1

    def _no_room(self, claim: Claim, error: OSError) -> TierFull:
        free = 0
        with contextlib.suppress(OSError):
            free = self._folder.free_bytes()
        advice = f"{error.strerror} in {self._folder.path}: make room, or lower spill_bytes"
        return self.full(claim.nbytes, free, advice, but=claim.extra)


@dataclass(slots=True, eq=False)
class Claim:
    """Room for a file of `nbytes`: a free file, others to remove, and `extra` bytes that belong to no file."""

    nbytes: int
    reused: SpillFile | None
    drop: list[SpillFile]
    extra: int = 0

    def growth(self) -> int:
        return max(0, self.nbytes - (self.reused.nbytes if self.reused is not None else 0))

    def to_drop(self) -> int:
        return sum(file.nbytes for file in self.drop)


@dataclass(slots=True, eq=False)
class SpillFile:
    """A file of a spill folder.

    nbytes: its length, or the limit of it. identity: of its last whole write, None before that. fd: below 0 but
    while it is written.
    """

    name: str
    nbytes: int = 0
    identity: Identity | None = None
    fd: int = -1


class Identity(NamedTuple):
    """Tells a file from any other, and from itself after its length was changed."""

    device: int
    inode: int
    owner: int
    links: int
    nbytes: int

"""Keeps the files of a spill folder within a limit of bytes, and uses them again."""

from __future__ import annotations

import contextlib
import errno
import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..errors import TierFull
from .files import Files
from .folder import SpillFolder
from .folder_files import FolderFiles, OpenFile, SpillFile
from .free_files import FreeFiles

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class FilePool:
    """Makes files, uses them again, and removes unneeded ones where room is short.

    Their lengths never add up to more than `capacity` bytes: room is claimed before a file grows, and given back
    after it has shrunk or is gone. Only `writing` and `reading` wait for the drive, and they hold no lock.
    """

    def __init__(self, folder: SpillFolder, files: Files, *, capacity: int, direct: bool) -> None:
        self._folder = folder
        self._files = FolderFiles(folder, files, direct=direct)
        self._capacity = capacity
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._free = FreeFiles()
        self._reserved = 0
        self._count = 0

    @property
    def available(self) -> int:
        """The bytes that a claim could get now."""
        with self._lock:
            return self._available()

    @property
    def reserved(self) -> int:
        """The bytes of all files and of all claims."""
        with self._lock:
            return self._reserved

    @property
    def count(self) -> int:
        """How many files there are."""
        with self._lock:
            return self._count

    def claim(self, nbytes: int) -> Claim:
        """Room for a file of `nbytes`: a free file, others to remove, and more of the drive. Raises TierFull."""
        with self._lock:
            if nbytes > self._available():
                raise self.full(nbytes, self._available(), "raise spill_bytes, or offload less")
            claim = Claim(nbytes, self._free.take_best(nbytes), self._free.take_doomed())
            room = self._capacity - self._reserved
            while claim.growth() > room + claim.to_drop():
                claim.drop.append(self._free.take_largest())
            claim.extra = min(claim.growth(), room)
            self._reserved += claim.extra
            return claim

    def cancel(self, claim: Claim) -> None:
        """Give back a claim whose write did not happen, or failed."""
        with self._lock:
            self._settle(claim)
            if claim.reused is not None:
                self._free.add(claim.reused)

    def give_back(self, file: SpillFile, *, sound: bool) -> None:
        """Nobody needs the file's record. A sound file is used again, another one is removed by the next claim."""
        with self._lock:
            if sound:
                self._free.add(file)
            else:
                self._free.doom(file)

    @contextlib.contextmanager
    def writing(self, claim: Claim) -> Iterator[OpenFile]:
        """An open file of the claimed size.

        After an error, here or in the caller's block, the file is removed and the caller has to cancel the claim.
        Raises OSError, and TierFull where the file system has no room.
        """
        opened = None
        try:
            self._drop_for(claim)
            opened = self._reused(claim) or self._created()
            self._resize(opened, claim)
            yield opened
            self._files.finish(opened)
        except BaseException as error:
            if opened is not None:
                self._files.abandon(opened)
                claim.drop.append(opened.file)
                self._drop_for(claim)
            if isinstance(error, OSError) and error.errno in _NO_ROOM:
                raise self._no_room(claim, error) from error
            raise
        with self._lock:
            self._settle(claim)

    @contextlib.contextmanager
    def reading(self, file: SpillFile) -> Iterator[int]:
        """A descriptor of a file that was written.

        Raises CorruptRecord where the file is gone, or is not the one that was written, and OSError.
        """
        opened = self._files.open(file, write=False)
        try:
            yield opened.fd
        finally:
            self._files.abandon(opened)

    def path(self, file: SpillFile) -> str:
        return self._files.path(file)

    def full(self, needed: int, free: int, advice: str, but: int = 0) -> TierFull:
        """The error for a lack of room. but: claimed bytes that do not count as used."""
        used = self._reserved - self._free.nbytes - but
        return TierFull("disk", needed=needed, free=free, used=used, limit=self._capacity, advice=advice)

    def _available(self) -> int:
        return self._capacity - self._reserved + self._free.nbytes

    def _reused(self, claim: Claim) -> OpenFile | None:
        if claim.reused is None:
            return None
        file, claim.reused = claim.reused, None
        try:
            return self._files.open(file, write=True)
        except OSError:
            # Whatever is wrong with it, a new one will do.
            claim.drop.append(file)
            self._drop_for(claim)
            return None

    def _created(self) -> OpenFile:
        opened = self._files.create(f"{next(self._numbers):06d}.safetensors")
        with self._lock:
            self._count += 1
        return opened

    def _resize(self, opened: OpenFile, claim: Claim) -> None:
        growth = claim.nbytes - opened.file.nbytes
        if growth < 0:
            self._files.truncate(opened, claim.nbytes)
        with self._lock:
            # What was to be dropped, and could not be, is missing here.
            more = max(0, growth - claim.extra)
            free = self._capacity - self._reserved
            if more > free:
                raise self.full(more, free, f"files in {self._folder.path} cannot be removed: see its permissions")
            claim.extra -= max(0, growth) - more
            self._reserved += min(0, growth) + more
            opened.file.nbytes = claim.nbytes
        if growth > 0:
            self._allocate(opened, claim.nbytes)

    def _allocate(self, opened: OpenFile, nbytes: int) -> None:
        try:
            self._files.allocate(opened, nbytes)
        except OSError as error:
            # Somebody else has filled the drive. What is kept here for later may make the room.
            if error.errno not in _NO_ROOM or not self._drop_free():
                raise
            self._files.allocate(opened, nbytes)

    def _drop_free(self) -> bool:
        """Removes the free files. Returns whether there were any."""
        with self._lock:
            files = self._free.take_usable()
        unneeded = Claim(0, None, [*files])
        self._drop_for(unneeded)
        self.cancel(unneeded)
        return bool(files)

    def _drop_for(self, claim: Claim) -> None:
        """Removes the files that a claim has to drop, and gives it their bytes. Others stay in the claim."""
        for file in tuple(claim.drop):
            if self._files.remove(file):
                with self._lock:
                    claim.drop.remove(file)
                    claim.extra += file.nbytes
                    self._count -= 1

    def _settle(self, claim: Claim) -> None:
        """Gives back the bytes of a claim that its file did not take."""
        self._reserved -= claim.extra
        claim.extra = 0
        for file in claim.drop:
            self._free.doom(file)
        claim.drop.clear()

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
    drop: list[SpillFile] = field(default_factory=list)
    extra: int = 0

    def growth(self) -> int:
        return max(0, self.nbytes - (self.reused.nbytes if self.reused is not None else 0))

    def to_drop(self) -> int:
        return sum(file.nbytes for file in self.drop)

"""How many bytes the files of a spill folder take, and which of them is used again."""

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
    """Makes files, uses them again, and drops those that nobody needs where room is short.

    Their lengths never add up to more than `capacity` bytes: room is claimed before a file grows, and given back
    after one has shrunk or is gone. Only `writing` and `reading` wait for the drive, without the lock.
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
        """The bytes of all files, and those that are claimed."""
        with self._lock:
            return self._reserved

    @property
    def count(self) -> int:
        """How many files there are."""
        with self._lock:
            return self._count

    def claim(self, nbytes: int) -> Claim:
        """Room for a file of so many bytes: one that is free, others that have to go, more of the drive.

        Raises TierFull.
        """
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
        """Give back a claim that was not written to, or not well."""
        with self._lock:
            self._settle(claim)
            if claim.reused is not None:
                self._free.add(claim.reused)

    def give_back(self, file: SpillFile, *, sound: bool) -> None:
        """Nobody needs what is in a file. It is used again if it is sound, else removed by the next claim."""
        with self._lock:
            if sound:
                self._free.add(file)
            else:
                self._free.doom(file)

    @contextlib.contextmanager
    def writing(self, claim: Claim) -> Iterator[OpenFile]:
        """A file of the size that was claimed.

        If this, or what is done with the file, raises, the file is removed, and the claim has to be given back.
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
        """The error for a lack of room. but: bytes that are claimed, and do not count."""
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
        """Whether there was anything to drop."""
        with self._lock:
            files = self._free.take_usable()
        unneeded = Claim(0, None, [*files])
        self._drop_for(unneeded)
        self.cancel(unneeded)
        return bool(files)

    def _drop_for(self, claim: Claim) -> None:
        """Removes what a claim has to drop, and gives it the bytes. It keeps what cannot be removed."""
        for file in tuple(claim.drop):
            if self._files.remove(file):
                with self._lock:
                    claim.drop.remove(file)
                    claim.extra += file.nbytes
                    self._count -= 1

    def _settle(self, claim: Claim) -> None:
        """Gives back what a claim has and its file has not."""
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
    """What becomes a file of `nbytes`: a free one, others that have to go, and `extra` bytes that are no file's."""

    nbytes: int
    reused: SpillFile | None
    drop: list[SpillFile] = field(default_factory=list)
    extra: int = 0

    def growth(self) -> int:
        return max(0, self.nbytes - (self.reused.nbytes if self.reused is not None else 0))

    def to_drop(self) -> int:
        return sum(file.nbytes for file in self.drop)

"""Opens and removes the files of one spill folder, and checks that each is still the same file."""

from __future__ import annotations

import contextlib
import errno
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import CorruptRecord
from .files import Files
from .folder import SpillFolder

# What opening says where there is no file, or something that is none; EINVAL of a pipe, with direct I/O.
_TAKEN_AWAY = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EINVAL)


class FolderFiles:
    """The files of a folder by their names. Every method waits for the drive, and raises OSError.

    direct: open them for direct I/O.
    """

    def __init__(self, folder: SpillFolder, files: Files, *, direct: bool) -> None:
        self._folder = folder
        self._files = files
        self._direct = direct

    def create(self, name: str) -> OpenFile:
        """Make an empty file."""
        return OpenFile(SpillFile(name), self._files.create(self._folder, name, self._direct), reused=False)

    def open(self, file: SpillFile, *, write: bool) -> OpenFile:
        """Open a finished file. Raises CorruptRecord where it is gone, or another file has its name."""
        try:
            fd = self._files.open(self._folder, file.name, self._direct, write=write)
        except OSError as error:
            if error.errno not in _TAKEN_AWAY:
                raise
            found = error.strerror
            raise CorruptRecord(self.path(file), "the file", expected=file.identity, found=found) from error
        opened = OpenFile(file, fd, reused=True)
        try:
            identity = self._identity(opened)
            if identity != file.identity:
                raise CorruptRecord(self.path(file), "another file", expected=file.identity, found=identity)
        except BaseException:
            self.abandon(opened)
            raise
        return opened

    def allocate(self, opened: OpenFile, nbytes: int) -> None:
        """Make a file longer, with room on the drive. A failed call may keep a part of the room."""
        self._files.allocate(opened.fd, nbytes)

    def truncate(self, opened: OpenFile, nbytes: int) -> None:
        """Make a file shorter."""
        self._files.truncate(opened.fd, nbytes)

    def finish(self, opened: OpenFile) -> None:
        """Close a file whose contents are complete."""
        opened.file.identity = self._identity(opened)
        self._close(opened)

    def abandon(self, opened: OpenFile) -> None:
        """Close a file if it is open, whatever is in it. Raises nothing."""
        with contextlib.suppress(OSError):
            self._close(opened)

    def remove(self, file: SpillFile) -> bool:
        """Removes a file. Returns whether it is gone. Raises nothing."""
        try:
            self._files.remove(self._folder, file.name)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def path(self, file: SpillFile) -> str:
        return str(self._folder.path / file.name)

    def _identity(self, opened: OpenFile) -> Identity:
        found = self._files.stat(opened.fd)
        return Identity(found.st_dev, found.st_ino, found.st_uid, found.st_nlink, found.st_size)

    def _close(self, opened: OpenFile) -> None:
        fd, opened.fd = opened.fd, -1
        if fd >= 0:
            self._files.close(fd)


@dataclass(slots=True, eq=False)
class SpillFile:
    """A file of a spill folder. nbytes: its length, or the limit of it."""

    name: str
    nbytes: int = 0
    identity: Identity | None = None


@dataclass(slots=True, eq=False)
class OpenFile:
    """fd: below 0 once it is closed. reused: an older record may still be in it."""

    file: SpillFile
    fd: int
    reused: bool


class Identity(NamedTuple):
    """Tells a file from any other, and from itself after its length was changed."""

    device: int
    inode: int
    owner: int
    links: int
    nbytes: int

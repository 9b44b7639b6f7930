"""A process's private folder for its spill files, and how those of dead processes are found and removed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import weakref
from dataclasses import dataclass
from pathlib import Path

from ..errors import Closed, SpillDirRefused
from ..sizes import format_bytes
from .filesystem import Files, filesystem_of, memory_at, pages
from .home import OWNER, Home, RunFolder
from .record import ALIGNMENT

_ATTEMPTS = 100
_PATTERN = bytes(range(256)) * (ALIGNMENT // 256)

_log = logging.getLogger("tiered_mem.spill")


class SpillFolder:
    """A folder below the user's spill_dir that only this process uses.

    It is <spill_dir>/tiered_mem-<uid>/<run>-<pid>-<random>/, and no other user may enter it. The file `owner` in it
    names its process. The process keeps that file locked, and the kernel drops the lock when the process ends,
    however it ends. So the next process can tell which of this user's processes are dead, and removes their folders
    first.

    The folder is removed by `close`, when nothing refers to it any more, or at exit. A forked child has no part in
    it: there the methods raise `Closed`, and the child neither removes the folder nor keeps it alive. Only a child
    that was forked behind Python's back, and runs no other program, keeps it from being swept while it lives.

    spill_dir: a directory on a local drive. It must exist and must not be a link.
    run: up to 100 letters, digits, "_", "-" and ".", not starting with "-" or ".".
    files: for tests.
    Raises SpillDirRefused, and ValueError for any other run.
    """

    def __init__(self, spill_dir: str | os.PathLike[str], *, run: str, files: Files | None = None) -> None:
        if not re.fullmatch(r"\w[\w.-]{0,99}", run, re.ASCII):
            raise ValueError(
                f"run: up to 100 letters, digits, '_', '-' and '.', not starting with '-' or '.', not {run!r}"
            )
        self._files = files or Files()
        self._folder = _made(spill_dir, run)
        self.path = self._folder.path
        self._end = weakref.finalize(self, _remove, self._folder, os.getpid())
        this = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _leave_to_the_parent(this()))
        self._warn()

    def create(self, name: str, flags: int = 0) -> int:
        """Make a file and open it for reading and writing. flags: more, such as os.O_DIRECT. Raises OSError."""
        return self._open(name, os.O_CREAT | os.O_EXCL | flags)

    def open(self, name: str, flags: int = 0, *, write: bool = True) -> int:
        """Open an existing file as `create` does; to read it only where `write` is False and writing is impossible.

        Raises OSError, for a link too.
        """
        try:
            return self._open(name, flags)
        except OSError as error:
            # The kernel makes many a file system read-only after an error on the drive: what is there can be read.
            if write or error.errno != errno.EROFS:
                raise
            return self._open(name, flags, os.O_RDONLY)

    def remove(self, name: str) -> None:
        """Remove a file. Raises OSError."""
        self._files.remove(_checked(name), self._fd())

    def free_bytes(self) -> int:
        """The bytes that the file system has left for this user. Quotas may leave less."""
        return self._files.free_bytes(self._fd())

    def takes_direct_io(self) -> bool:
        """Whether direct I/O works in this folder, found by a trial. If it does not, ordinary I/O does.

        Raises SpillDirRefused where neither works.
        """
        try:
            self._try("direct.trial", os.O_DIRECT)
            return True
        except OSError as error:
            refusal = str(error)
        try:
            self._try("cached.trial", 0)
        except OSError as error:
            raise SpillDirRefused(
                f"a file in {self.path} cannot be written and read back: {error}. Choose a spill_dir on a local "
                "drive that works and has room"
            ) from error
        _log.info(
            "%s takes no direct I/O (%s): records go through the page cache, and are dropped from it, which costs "
            "time",
            *(self.path, refusal),
        )
        return False

    def close(self) -> None:
        """Remove the folder and its files, and log what cannot be removed. Idempotent.

        Folders inside and other users' files stay. A link is removed, not followed.
        """
        self._end()

    def _open(self, name: str, flags: int, mode: int = os.O_RDWR) -> int:
        return self._files.open(_checked(name), mode | os.O_NOFOLLOW | os.O_CLOEXEC | flags, self._fd())

    def _try(self, name: str, flags: int) -> None:
        """Writes and reads a block with the smallest alignment that records use. Raises OSError."""
        fd = self.create(name, flags)
        try:
            with pages(2 * ALIGNMENT) as start:
                ptr = start + ALIGNMENT
                block = memory_at(ptr, ALIGNMENT)
                block[:] = _PATTERN
                written = self._files.pwrite(fd, ptr, ALIGNMENT, ALIGNMENT)
                block[:] = bytes(ALIGNMENT)
                read = self._files.pread(fd, ptr, ALIGNMENT, ALIGNMENT)
                if written != ALIGNMENT or read != ALIGNMENT or block != _PATTERN:
                    raise OSError(errno.EIO, "what comes back is not what was written")
        finally:
            with contextlib.suppress(OSError):
                self._files.close(fd)
            self.remove(name)

    def _fd(self) -> int:
        if not self._end.alive:
            raise Closed(f"the spill folder {self.path} is closed, or is that of the process that forked this one")
        return self._folder.fd

    def _warn(self) -> None:
        found = filesystem_of(self._folder.home.fd)
        problems = {
            "which is memory: what is spilled there still takes up RAM": found.in_memory,
            "which is no local file system: it may be slow, and if this machine does not start again, nobody "
            "removes what it leaves": found.network,
        }
        for problem, there in problems.items():
            if there:
                advice = "Choose a spill_dir on a local drive"
                _log.warning("%s lies on %s, %s. %s", self.path, found.name, problem, advice)


@dataclass(frozen=True, slots=True)
class Owned:
    """A folder of this user's, as it was found.

    alive: whether its process lives. On a network file system the processes of other machines count as alive.
    nbytes: the sizes of its files together, without the owner file. files: their number.
    """

    path: Path
    run: str
    pid: int
    alive: bool
    nbytes: int
    files: int


def owners(spill_dir: str | os.PathLike[str]) -> list[Owned]:
    """All folders of this user below spill_dir. Raises SpillDirRefused."""
    found: list[Owned] = []
    with contextlib.suppress(FileNotFoundError), contextlib.closing(Home(spill_dir)) as home:
        for name in home.names():
            if (folder := home.open(name)) is not None:
                with contextlib.closing(folder):
                    alive = not folder.going and (folder.elsewhere() or not folder.lock(fcntl.LOCK_SH))
                    if folder.is_there():
                        found.append(_owned(folder, alive))
    return found


def sweep(spill_dir: str | os.PathLike[str]) -> list[Owned]:
    """Remove the folders of this user's dead processes, and return them. Raises SpillDirRefused."""
    swept: list[Owned] = []
    with contextlib.suppress(FileNotFoundError), contextlib.closing(Home(spill_dir)) as home:
        swept += _sweep(home)
        home.remove_if_empty()
    return swept


def _made(spill_dir: str | os.PathLike[str], run: str) -> RunFolder:
    """A new folder, after a sweep. Its home stays open."""
    for _ in range(_ATTEMPTS):
        try:
            home = Home(spill_dir, make=True)
            try:
                _sweep(home)
                return home.make(run)
            except BaseException:
                home.remove_if_empty()
                home.close()
                raise
        except FileNotFoundError:
            continue  # another process swept the folder, or removed the home, before this one had a lock
        except SpillDirRefused:
            raise
        except OSError as error:
            raise SpillDirRefused(
                f"no folder can be made in {os.fspath(spill_dir)}: {error.strerror}. spill_dir must be on a drive "
                "that has room, and this user must be allowed to write there"
            ) from error
    raise SpillDirRefused(f"in {os.fspath(spill_dir)}, {_ATTEMPTS} new folders vanished one after another")


def _sweep(home: Home) -> list[Owned]:
    swept = []
    # What others are removing just now comes last, and is waited for: its room will be free in a moment.
    for going in (False, True):
        for name in home.names(going=going):
            folder = home.open(name)
            if folder is None:
                home.remove_unowned(name)
                continue
            with contextlib.closing(folder):
                if not folder.elsewhere() and folder.lock(fcntl.LOCK_EX, wait=going):
                    found = _owned(folder, alive=False)
                    if folder.remove():
                        swept.append(found)
    for each in swept:
        _log.info(
            "swept %s: process %d is dead, and left %d files of %s",
            *(each.path, each.pid, each.files, format_bytes(each.nbytes)),
        )
    return swept


def _owned(folder: RunFolder, alive: bool) -> Owned:
    sizes = folder.sizes()
    return Owned(folder.path, folder.run, folder.pid, alive, sum(sizes), len(sizes))


def _remove(folder: RunFolder, pid: int) -> None:
    if os.getpid() == pid:
        folder.remove()
        folder.home.remove_if_empty()
        folder.home.close()


def _leave_to_the_parent(folder: SpillFolder | None) -> None:
    """In a forked child: close the inherited files, since a lock lasts until all copies are closed."""
    if folder is not None and folder._end.detach() is not None:
        folder._folder.close()
        folder._folder.home.close()


def _checked(name: str) -> str:
    if name in ("", ".", "..", OWNER) or "/" in name:
        raise ValueError(f"{name!r} is no name for a spill file")
    return name

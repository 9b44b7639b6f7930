"""The folder that holds all of a user's spill folders. Open descriptors check every step down to them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
from pathlib import Path
from typing import NoReturn

from ..errors import SpillDirRefused
from .filesystem import FileSystem, filesystem_of
from .run_folder import GOING, RunFolder

_PREFIX = "tiered_mem-"
_NAME = re.compile(r"(?P<run>\w[\w.-]*)-(?P<pid>\d+)-[0-9a-f]{16}(?:\.going)?", re.ASCII)
_STEP = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# What os.open of a folder says, and what the user is told.
_UNUSABLE = {
    FileNotFoundError: "does not exist; make it first, on a local drive",
    NotADirectoryError: "is not a directory",
    PermissionError: "may not be entered by this user",
}


class Home:
    """<spill_dir>/tiered_mem-<uid>, which this user alone may enter. It holds one folder for each process.

    make: make it where it is missing.
    Raises SpillDirRefused, and FileNotFoundError where it is missing or has just been removed.
    """

    def __init__(self, spill_dir: str | os.PathLike[str], *, make: bool = False) -> None:
        self._name = f"{_PREFIX}{os.geteuid()}"
        self._above = _spill_dir(spill_dir)
        self.path = Path(spill_dir).absolute() / self._name
        try:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self._name, 0o700, dir_fd=self._above)
            self.fd = _own_folder(self._name, self._above, self.path)
        except BaseException:
            os.close(self._above)
            raise

    @property
    def filesystem(self) -> FileSystem:
        return filesystem_of(self.fd)

    def names(self, *, going: bool | None = None) -> list[str]:
        """The names of the processes' folders. going: only those that are being removed, or only the others."""
        names = sorted(name for name in os.listdir(self.fd) if _NAME.fullmatch(name))
        return [name for name in names if going is None or name.endswith(GOING) is going]

    def make(self, run: str) -> RunFolder:
        """A new folder, locked. Raises FileNotFoundError where another process swept it before it was locked."""
        name = f"{run}-{os.getpid()}-{secrets.token_hex(8)}"
        os.mkdir(name, 0o700, dir_fd=self.fd)
        folder = None
        try:
            fd = _own_folder(name, self.fd, self.path / name)
            folder = RunFolder(self, name, fd, run, os.getpid(), create=True)
            # To those who sweep, an empty folder and a free lock are a dead process's. They remove files only under
            # the lock; so once it is taken here, and the folder still there, nobody else will touch it.
            if not folder.lock(fcntl.LOCK_EX, wait=True):
                raise FileNotFoundError(name)
            folder.sign()
        except BaseException:
            if folder is None:
                self.remove_unowned(name)
            else:
                folder.remove()
            raise
        return folder

    def open(self, name: str) -> RunFolder | None:
        """A process's folder; None where it is gone, has no owner file, or belongs to another user."""
        words = _NAME.fullmatch(name)
        if words is None:
            return None
        try:
            fd = _own_folder(name, self.fd, self.path / name)
            return RunFolder(self, name, fd, words["run"], int(words["pid"]))
        except OSError:
            return None

    def remove_unowned(self, name: str) -> None:
        """Remove a folder without an owner file. It is empty, for that file is made first and removed last."""
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=self.fd)

    def remove_if_empty(self) -> None:
        with contextlib.suppress(OSError):
            os.rmdir(self._name, dir_fd=self._above)

    def close(self) -> None:
        os.close(self.fd)
        os.close(self._above)

    def __enter__(self) -> Home:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def user_of(name: str) -> int | None:
    """The number of the user whose home has this name; None for any other name."""
    words = re.fullmatch(rf"{_PREFIX}(\d+)", name, re.ASCII)
    return None if words is None else int(words[1])


def _spill_dir(spill_dir: str | os.PathLike[str]) -> int:
    """The user's directory, opened."""
    if not os.fspath(spill_dir):
        raise SpillDirRefused("spill_dir is empty; give a directory on a local drive")
    # A path that ends in a slash would be followed where it is a link, and Path takes that off.
    path = Path(spill_dir)
    try:
        fd = os.open(path, os.O_PATH | _STEP)
    except OSError as error:
        if path.is_symlink():
            _refuse(path, f"is a symbolic link, which anybody may turn; give {path.resolve()} itself")
        _refuse(path, _UNUSABLE.get(type(error), f"cannot be opened: {error.strerror}"))
    mode = os.fstat(fd).st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        os.close(fd)
        _refuse(
            path,
            f"may be changed by everybody (mode {stat.S_IMODE(mode):04o}), so that anybody could take files away "
            "there; chmod o-w or chmod +t it",
        )
    return fd


def _own_folder(name: str, parent: int, path: Path) -> int:
    """A folder that this user alone may enter, opened. Raises SpillDirRefused, and FileNotFoundError."""
    try:
        # A look needs no rights in the folder, so that it can be told whose it is.
        look = os.open(name, os.O_PATH | _STEP, dir_fd=parent)
    except NotADirectoryError:
        _refuse(path, "is a link or a file, and not a folder that this user has made; remove it")
    try:
        found = os.fstat(look)
        if found.st_uid != os.geteuid():
            _refuse(path, f"belongs to user {found.st_uid}, not to {os.geteuid()}; choose another spill_dir")
        if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            mode = stat.S_IMODE(found.st_mode)
            _refuse(path, f"is open to others (mode {mode:04o}); remove it, or chmod 700 it if its files are yours")
        return os.open(".", os.O_RDONLY | _STEP, dir_fd=look)
    finally:
        os.close(look)


def _refuse(path: Path, why: str) -> NoReturn:
    raise SpillDirRefused(f"{path} {why}")

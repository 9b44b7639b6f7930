"""The folder of a user's spill folders, and each of those. Open descriptors check every step down to them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import secrets
import stat
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import NoReturn

from ..errors import SpillDirRefused
from .filesystem import filesystem_of

OWNER = "owner"
# The end of the folder's name once somebody has begun to remove it.
_GOING = ".going"

# How long a lock is waited for, in seconds, and how often it is tried.
_PATIENCE_S, _PAUSE_S = 30.0, 0.01
# How much of the owner file is read, and how many of the files that cannot be removed are named.
_OWNER_BYTES, _NAMED = 4096, 3
_PREFIX = "tiered_mem-"
_NAME = re.compile(r"\w[\w.-]*-\d+-[0-9a-f]{16}(\.going)?", re.ASCII)
_STEP = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# What os.open of a folder says, and what the user is told.
_UNUSABLE = {
    FileNotFoundError: "does not exist; make it first, on a local drive",
    NotADirectoryError: "is not a directory",
    PermissionError: "may not be entered by this user",
}

_log = logging.getLogger("tiered_mem.spill")


class Home:
    """<spill_dir>/tiered_mem-<uid>, which this user alone may enter. It holds one folder for each process.

    make: make it where it is missing.
    Raises SpillDirRefused, and FileNotFoundError where it is missing or has just been removed.
    """

    def __init__(self, spill_dir: str | os.PathLike[str], *, make: bool = False) -> None:
        self._name = f"{_PREFIX}{os.geteuid()}"
        self._above = opened_spill_dir(spill_dir)
        self.path = Path(spill_dir).absolute() / self._name
        try:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self._name, 0o700, dir_fd=self._above)
            self.fd = _own_folder(self._name, self._above, self.path)
        except BaseException:
            os.close(self._above)
            raise

    def names(self, *, going: bool | None = None) -> list[str]:
        """The names of the processes' folders. going: only those that are being removed, or only the others."""
        names = sorted(name for name in os.listdir(self.fd) if _NAME.fullmatch(name))
        return [name for name in names if going is None or name.endswith(_GOING) is going]

    def make(self, run: str) -> RunFolder:
        """A new folder, locked. Raises FileNotFoundError where another process swept it before it was locked."""
        name = f"{run}-{os.getpid()}-{secrets.token_hex(8)}"
        os.mkdir(name, 0o700, dir_fd=self.fd)
        folder = None
        try:
            folder = RunFolder(self, name, create=True)
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
        """One of `names`; None where it is gone, has no owner file, or belongs to another user."""
        try:
            return RunFolder(self, name)
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


class RunFolder:
    """An open folder with its open owner file. The process that holds the file's lock may change the folder.

    name: one of `Home.names`. create: make the owner file. Raises SpillDirRefused, and other OSErrors.
    """

    def __init__(self, home: Home, name: str, *, create: bool = False) -> None:
        self.run, pid, _ = name.removesuffix(_GOING).rsplit("-", 2)
        self.home, self.pid = home, int(pid)
        self.path = home.path / name
        self.going = name.endswith(_GOING)
        self._name = name
        self.fd = _own_folder(name, home.fd, self.path)
        self._open = [self.fd]
        try:
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
            self._owner = os.open(OWNER, flags, 0o600, dir_fd=self.fd)
        except BaseException:
            self.close()
            raise
        self._open.append(self._owner)

    def lock(self, how: int, *, wait: bool = False) -> bool:
        """Take the lock, by LOCK_SH or LOCK_EX. False where another process has it, or the folder is gone.

        wait: up to half a minute. Raises SpillDirRefused where the file system has no locks.
        """
        deadline = time.monotonic() + (_PATIENCE_S if wait else 0)
        while True:
            try:
                fcntl.flock(self._owner, how | fcntl.LOCK_NB)
                return self.is_there()
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(_PAUSE_S)
            except OSError as error:
                where = filesystem_of(self.home.fd).name
                raise SpillDirRefused(
                    f"{self.path} cannot be locked ({error.strerror}), and locks tell the files of a live process "
                    f"from those of a dead one; choose a spill_dir that is not on {where}"
                ) from error

    def is_there(self) -> bool:
        """Whether the folder still has its name and its owner file."""
        try:
            os.stat(f"{self._name}/{OWNER}", dir_fd=self.home.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def sign(self) -> None:
        """Write the owner file. Raises OSError."""
        started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        text = json.dumps({"pid": self.pid, "host": os.uname().nodename, "started": started, "run": self.run})
        os.write(self._owner, f"{text}\n".encode())
        # systemd-tmpfiles, which removes old files from /tmp, leaves alone what is below a locked folder.
        with contextlib.suppress(OSError):
            fcntl.flock(self.fd, fcntl.LOCK_SH)

    def elsewhere(self) -> bool:
        """Whether it may belong to another machine, whose locks need not reach this one."""
        if not filesystem_of(self.home.fd).network:
            return False
        try:
            return bool(json.loads(os.pread(self._owner, _OWNER_BYTES, 0))["host"] != os.uname().nodename)
        except (OSError, ValueError, KeyError, TypeError):
            return True

    def sizes(self) -> list[int]:
        """The sizes of its files in bytes, without the owner file."""
        sizes = []
        with contextlib.suppress(FileNotFoundError):
            for name in self._files():
                with contextlib.suppress(FileNotFoundError):
                    sizes.append(os.stat(name, dir_fd=self.fd, follow_symlinks=False).st_size)
        return sizes

    def remove(self) -> bool:
        """Remove the folder with its files, and close it. Whether it is gone. The caller has the lock.

        Files that cannot be removed are logged, and left to the next sweep with the owner file.
        """
        going = self._name.removesuffix(_GOING) + _GOING
        try:
            with contextlib.suppress(FileNotFoundError):
                os.rename(self._name, going, src_dir_fd=self.home.fd, dst_dir_fd=self.home.fd)
            left = [f"{name} ({why})" for name in self._files() if (why := self._remove(name))]
            if left:
                named = ", ".join(left[:_NAMED])
                _log.warning("%s stays, with %d files: %s", self.home.path / going, len(left), named)
                return False
            os.unlink(OWNER, dir_fd=self.fd)
            # Network file systems keep an open file, under another name, and its folder with it.
            self.close()
            os.rmdir(going, dir_fd=self.home.fd)
        except FileNotFoundError:  # somebody else was quicker
            pass
        except OSError as error:
            _log.warning("%s cannot be removed: %s", self.home.path / going, str(error))
            return False
        finally:
            self.close()
        return True

    def close(self) -> None:
        """Close the files, which gives up the lock. Idempotent."""
        while self._open:
            os.close(self._open.pop())

    def _files(self) -> list[str]:
        return sorted(set(os.listdir(self.fd)) - {OWNER})

    def _remove(self, name: str) -> str:
        """Remove a file. Returns the reason where that is impossible, else ""."""
        try:
            found = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
            if found.st_uid != os.geteuid():
                return f"it belongs to user {found.st_uid}"
            os.unlink(name, dir_fd=self.fd)
        except FileNotFoundError:
            pass
        except OSError as error:
            return error.strerror or str(error)
        return ""


def user_of(name: str) -> int | None:
    """The number of the user whose home has this name; None for any other name."""
    words = re.fullmatch(rf"{_PREFIX}(\d+)", name, re.ASCII)
    return None if words is None else int(words[1])


def opened_spill_dir(spill_dir: str | os.PathLike[str]) -> int:
    """The user's directory, opened. Raises SpillDirRefused."""
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

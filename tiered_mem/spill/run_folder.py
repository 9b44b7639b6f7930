"""One process's spill folder, as its owner sees it and as a sweep does."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import time
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from ..errors import SpillDirRefused

if TYPE_CHECKING:
    from .home import Home

OWNER = "owner"
# The end of the folder's name once somebody has begun to remove it.
GOING = ".going"

# How long a lock is waited for, in seconds, and how often it is tried.
_PATIENCE_S, _PAUSE_S = 30.0, 0.01
# How much of the owner file is read, and how many of the files that cannot be removed are named.
_OWNER_BYTES, _NAMED = 4096, 3

_log = logging.getLogger("tiered_mem.spill")


class RunFolder:
    """An open folder with its open owner file. The process that holds the file's lock may change the folder.

    fd: of the folder; it is closed here, even if this raises. create: make the owner file. Raises OSError.
    """

    def __init__(self, home: Home, name: str, fd: int, run: str, pid: int, *, create: bool = False) -> None:
        self.home, self.fd, self.run, self.pid = home, fd, run, pid
        self._name = name
        self._open = [fd]
        try:
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
            self._owner = os.open(OWNER, flags, 0o600, dir_fd=fd)
        except BaseException:
            self.close()
            raise
        self._open.append(self._owner)
        self.path = home.path / name
        self.going = name.endswith(GOING)

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
                raise SpillDirRefused(
                    f"{self.path} cannot be locked ({error.strerror}), and locks tell the files of a live process "
                    f"from those of a dead one; choose a spill_dir that is not on {self.home.filesystem.name}"
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
        if not self.home.filesystem.network:
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
        going = self._name.removesuffix(GOING) + GOING
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

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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

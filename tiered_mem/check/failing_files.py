"""Files of a drive on which writing fails after a while."""

from __future__ import annotations

import errno
import os
import threading

from ..spill.filesystem import Files


class FailingFiles(Files):
    """files: what does the work. code: of the error, after so many writes."""

    def __init__(self, files: Files, code: str, *, after: int) -> None:
        self._files = files
        self._code = getattr(errno, code)
        self._left = after
        self._lock = threading.Lock()

    def pread(self, fd: int, ptr: int, nbytes: int, offset: int) -> int:
        return self._files.pread(fd, ptr, nbytes, offset)

    def pwrite(self, fd: int, ptr: int, nbytes: int, offset: int) -> int:
        with self._lock:
            self._left -= 1
            fails = self._left < 0
        if fails:
            raise OSError(self._code, os.strerror(self._code))
        return self._files.pwrite(fd, ptr, nbytes, offset)

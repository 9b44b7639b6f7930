"""Files whose calls fail, wait and are noted down as a test says."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tiered_mem.spill.filesystem import Files

SHORT = -1  # in place of an errno: half of what was asked for, in whole blocks
NOTHING = -2  # in place of an errno: 0 bytes
ODD = -3  # in place of an errno: half of what was asked for, and a sector more


@dataclass
class Fault:
    """The calls number `skip` and the `times` - 1 after it fail."""

    how: int
    skip: int
    times: float


@dataclass(frozen=True)
class Call:
    """offset, nbytes: of what is written or read, or the length that a file gets."""

    operation: str
    offset: int = 0
    nbytes: int = 0


class Hold:
    """A call that waits. `reached` is set when it is made; it goes on with `go_on`."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.go_on = threading.Event()


class FaultyFiles:
    """The system's files with faults.

    watch: called after each call that may change the length of a file, whatever came of it. still: whoever holds it
    sees no length change. most_open: how many files were open at a time.
    """

    def __init__(self, *, takes_direct: bool = True) -> None:
        self._files = Files()
        self._takes_direct = takes_direct
        self._lock = threading.Lock()
        self._faults: dict[str, Fault] = {}
        self._holds: dict[str, Hold] = {}
        self.calls: list[Call] = []
        self.failed: list[str] = []
        self.most_open = 0
        self._open: set[int] = set()
        self.watch: Callable[[], None] = lambda: None
        self.still = threading.RLock()

    def fail(self, operation: str, how: int = errno.EIO, *, skip: int = 0, times: float = 1) -> None:
        """Let calls of an operation fail, from now on, with an errno, SHORT, NOTHING or ODD."""
        with self._lock:
            self._faults[operation] = Fault(how, skip, times)

    def heal(self) -> None:
        with self._lock:
            self._faults.clear()

    @contextlib.contextmanager
    def hold(self, operation: str) -> Iterator[Hold]:
        """The next call of an operation waits, until the end of the block at most."""
        hold = self._holds[operation] = Hold()
        try:
            yield hold
        finally:
            self._holds.pop(operation, None)
            hold.go_on.set()

    def named(self, *operations: str) -> list[Call]:
        """The calls of some operations, in order."""
        return [call for call in self.calls if call.operation in operations]

    def open(self, name: str, flags: int, folder: int) -> int:
        operation = "create" if flags & os.O_CREAT else "open"
        return self._opened(self._call(operation, lambda: self._files.open(name, self._checked(flags), folder)))

    def pread(self, fd: int, ptr: int, nbytes: int, offset: int) -> int:
        return self._move("pread", self._files.pread, fd, ptr, nbytes, offset)

    def pwrite(self, fd: int, ptr: int, nbytes: int, offset: int) -> int:
        return self._move("pwrite", self._files.pwrite, fd, ptr, nbytes, offset)

    def contents(self, ptr: int, nbytes: int) -> memoryview:
        return self._files.contents(ptr, nbytes)

    def allocate(self, fd: int, nbytes: int) -> None:
        # One that fails keeps what it got.
        self._call("allocate", lambda: None, lambda: self._files.allocate(fd, nbytes), nbytes=nbytes)

    def truncate(self, fd: int, nbytes: int) -> None:
        self._call("truncate", lambda: self._files.truncate(fd, nbytes), nbytes=nbytes)

    def stat(self, fd: int) -> os.stat_result:
        return self._call("stat", lambda: self._files.stat(fd))

    def free_bytes(self, folder: int) -> int:
        return self._files.free_bytes(folder)

    def sync(self, fd: int) -> None:
        self._call("sync", lambda: self._files.sync(fd))

    def advise_dropped(self, fd: int) -> None:
        self._call("advise_dropped", lambda: self._files.advise_dropped(fd))

    def close(self, fd: int) -> None:
        # The descriptor of one that fails is gone all the same.
        with self._lock:
            self._open.remove(fd)
        self._call("close", lambda: None, lambda: self._files.close(fd))

    def remove(self, name: str, folder: int) -> None:
        self._call("remove", lambda: self._files.remove(name, folder))

    def _opened(self, fd: int) -> int:
        with self._lock:
            self._open.add(fd)
            self.most_open = max(self.most_open, len(self._open))
        return fd

    def _checked(self, flags: int) -> int:
        if flags & os.O_DIRECT and not self._takes_direct:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return flags

    def _move(self, operation: str, move: Callable[..., int], fd: int, ptr: int, nbytes: int, offset: int) -> int:
        how = self._begin(Call(operation, offset, nbytes))
        if how in (SHORT, ODD):
            return move(fd, ptr, nbytes // 2 // 4096 * 4096 + 512 * (how == ODD), offset)
        if how == NOTHING:
            return 0
        _raise(how)
        return move(fd, ptr, nbytes, offset)

    def _call(
        self, operation: str, call: Callable[[], Any], first: Callable[[], None] = lambda: None, *, nbytes: int = 0
    ) -> Any:
        how = self._begin(Call(operation, nbytes=nbytes))
        with self.still:
            try:
                first()
                _raise(how)
                return call()
            finally:
                self.watch()

    def _begin(self, call: Call) -> int | None:
        """What is to go wrong."""
        hold = self._holds.pop(call.operation, None)
        if hold is not None:
            hold.reached.set()
            assert hold.go_on.wait(60)
        with self._lock:
            self.calls.append(call)
            fault = self._faults.get(call.operation)
            if fault is None:
                return None
            if fault.skip > 0:
                fault.skip -= 1
                return None
            fault.times -= 1
            if fault.times <= 0:
                del self._faults[call.operation]
            self.failed.append(call.operation)
            return fault.how


def _raise(how: int | None) -> None:
    if how is not None:
        code = how if how > 0 else errno.EIO
        raise OSError(code, os.strerror(code))

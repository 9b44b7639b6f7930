"""Files that tell the emulator's race detector which memory they read and fill."""

from __future__ import annotations

import contextlib
import importlib.util
import threading

from tiered_mem.spill.filesystem import Files

if importlib.util.find_spec("ascend_emulator") is not None:
    from ascend_emulator import host_access
else:

    def host_access(ptr: int, nbytes: int, *, write: bool, what: str) -> contextlib.AbstractContextManager[None]:
        """Without the emulator nobody looks for races."""
        return contextlib.nullcontext()


class DeclaredFiles(Files):
    """The system's files. While `hold` is set, no operation begins; `arrived` is set when one has to wait."""

    def __init__(self) -> None:
        self.hold = False
        self.arrived = threading.Event()
        self._go = threading.Event()

    def let_go(self) -> None:
        """What was held goes on."""
        self.hold = False
        self._go.set()

    def pread(self, fd: int, ptr: int, nbytes: int, offset: int) -> int:
        self._wait()
        with host_access(ptr, nbytes, write=True, what="pread"):
            return super().pread(fd, ptr, nbytes, offset)

    def pwrite(self, fd: int, ptr: int, nbytes: int, offset: int) -> int:
        self._wait()
        with host_access(ptr, nbytes, write=False, what="pwrite"):
            return super().pwrite(fd, ptr, nbytes, offset)

    def _wait(self) -> None:
        if self.hold:
            self.arrived.set()
            self._go.wait()

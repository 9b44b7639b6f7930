"""Files that tell the emulator's race detector which memory they read and fill."""

from __future__ import annotations

import threading

from ascend_emulator import host_access

from tiered_mem.spill.files import OsFiles


class DeclaredFiles(OsFiles):
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

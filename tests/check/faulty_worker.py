"""A worker of `tiered-mem check` with a drive, or a library, that has a fault: its name is the first argument."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tiered_mem.check.failing_files import FailingFiles
from tiered_mem.check.worker import serve
from tiered_mem.device.transfer import Ticket
from tiered_mem.spill.filesystem import Files, memory_at


class WrongBytes(Files):
    """Each long read brings another bit; the tier itself tries out a short one."""

    def pread(self, fd: int, ptr: int, nbytes: int, offset: int) -> int:
        count = super().pread(fd, ptr, nbytes, offset)
        memory_at(ptr, nbytes)[count - 1] ^= nbytes > 1 << 16
        return count


class NoEnd(Files):
    """No write ends."""

    def pwrite(self, fd: int, ptr: int, nbytes: int, offset: int) -> int:
        threading.Event().wait()
        raise AssertionError("it has ended")


class Death(Files):
    """A write ends the process."""

    def pwrite(self, fd: int, ptr: int, nbytes: int, offset: int) -> int:
        os.write(2, b"the driver says why\n")
        os.abort()


DRIVES = {
    "none": Files(),
    "wrong bytes": WrongBytes(),
    "EIO": FailingFiles(Files(), "EIO", after=0),
    "ENOSPC": FailingFiles(Files(), "ENOSPC", after=0),
    "no end": NoEnd(),
    "death": Death(),
    "no second start": FailingFiles(Files(), "EIO", after=0),
}


def wait_for_nothing(ticket: Ticket, stream: object, why: str | None = None) -> None:
    """In place of Ticket.hold, as a library would that has lost this wait."""


if __name__ == "__main__":
    fault, arguments, answers = sys.argv[1:]
    if fault == "lost hold":
        Ticket.hold = wait_for_nothing  # type: ignore[method-assign,assignment]
        fault = "none"
    if fault == "no second start":
        try:
            (Path(json.loads(arguments)["folder"]) / "started").touch(exist_ok=False)
        except FileExistsError:
            sys.exit("the device does not answer")
    with os.fdopen(int(answers), "w") as file:
        serve(json.loads(arguments), sys.stdin, file, DRIVES[fault])

"""A record of the disk tier, and the tier's counters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from .file_pool import Claim
from .folder_files import SpillFile
from .io_queue import Job
from .record import ALIGNMENT
from .record_io import Stored
from .write_gate import State


@dataclass(slots=True, eq=False)
class Record:
    """One file's worth of memory, on its way to the drive or there.

    number: no other record of the tier has it. nbytes: the size of its file. job: the write; once it is done
    without an error, the record is on the drive. The rest is the tier's.
    """

    number: int
    nbytes: int
    claim: Claim
    job: Job = field(init=False)
    file: SpillFile | None = None
    stored: Stored | None = None
    operations: int = 1
    counted: bool = True
    released: bool = False
    sound: bool = True

    @property
    def cost(self) -> int:
        """The most bytes that writing it takes, with the zeros that first end the older record in its file."""
        return self.nbytes + ALIGNMENT


OperationKind = Literal["read", "write"]


class Operation(NamedTuple):
    """A read or a write that has ended, well or not. began, ended: seconds of time.perf_counter."""

    kind: OperationKind
    nbytes: int
    began: float
    ended: float


@dataclass(slots=True)
class Counts:
    """Counts records that are not released, and operations. The names are those of `DiskStats`."""

    used: int = 0
    peak: int = 0
    records: int = 0
    read: int = 0
    failures: int = 0

    def add(self, record: Record) -> None:
        self.used += record.nbytes
        self.peak = max(self.peak, self.used)
        self.records += 1

    def remove(self, record: Record) -> None:
        """Idempotent."""
        if record.counted:
            record.counted = False
            self.used -= record.nbytes
            self.records -= 1


@dataclass(frozen=True, slots=True)
class DiskStats:
    """The state of a `DiskTier`: bytes, unless said otherwise.

    The files of `records` records take `used` now, and took `peak` at most. All `files` files take `reserved`; some
    of them wait to be used again. `written` went to the drive, `read` came from it, and `failures` operations ended
    in an error. `direct`: whether files are opened for direct I/O.

    state: "failing" after a failed write until one succeeds; "budget spent" where the last requested write was more
    than the rest of the write budget; else "ok".
    """

    capacity: int
    used: int
    reserved: int
    peak: int
    records: int
    files: int
    written: int
    read: int
    failures: int
    state: State
    direct: bool

"""The seam below host memory: a tier takes bytes in records, and gives them back.

`DiskTier` is one. docs/lower_tier.md says how to make another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

State = Literal["ok", "failing", "budget spent"]
# Hears of a read or a write that has ended, well or not: its bytes, and when it began and ended by `now`.
Watcher = Callable[[Literal["read", "write"], int, float, float], None]

METHODS = ("accepts", "write", "read", "release", "stats", "watch", "now", "close")


class LowerTier(Protocol):
    """Keeps records of host memory, each of one or several pieces.

    Operations go on by themselves, and only `close` waits for them. Any thread may call any method.

    A read gives what was written, or its job has an error. A write that fails costs time only: the caller keeps the
    memory until the job is done without an error, and asks again later.

    A record is what `write` has returned. The tier may keep in it whatever it likes.
    """

    def accepts(self, nbytes: int) -> bool:
        """Whether `write` would begin to write `nbytes` now. It may refuse nevertheless."""

    def write(self, pieces: Sequence[Piece], *, step: int, kind: str) -> Record:
        """Begin to write a record. The memory must stay as it is until the record's job is done.

        step, kind: notes for people.

        Raises TierFull where the tier takes nothing now, and Closed.
        """

    def read(self, record: Any, wanted: Sequence[tuple[int, int]]) -> Job:
        """Begin to read pieces of a record that is written: the index of each, and the address that it goes to.

        The memory belongs to the operation until the job is done, up to the next multiple of 4096 behind each
        piece. Its contents are undefined if the job ends with an error.

        Raises Closed.
        """

    def release(self, record: Any) -> None:
        """Nobody needs the record. Idempotent. Reads that are under way end as if it were still there.

        A write that has not begun is given up, and its job is done at once. One that has begun reads the memory
        until its job is done.
        """

    def stats(self) -> TierStats:
        """Return the counters of this moment."""

    def watch(self, watcher: Watcher) -> None:
        """Have `watcher` called for each operation that ends from now on, by any thread."""

    def now(self) -> float:
        """The seconds of the clock that watchers are told: time.perf_counter, if the tier has none of its own."""

    def close(self) -> None:
        """End, after the operations that are under way. Idempotent."""


class Record(Protocol):
    """A tier's own account of one write. job: once it is done without an error, the bytes are in the tier."""

    @property
    def job(self) -> Job: ...


class Job(Protocol):
    """An operation of a tier."""

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not. Does not wait."""

    @property
    def error(self) -> Exception | None:
        """Its error. None while it is under way, and after success."""

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for its end, at most so many seconds. Whether it has ended. Raises nothing: see `error`."""


class Piece(NamedTuple):
    """Memory that becomes a part of a record.

    name, dtype: notes for people; torch's dtype without "torch.". ptr: an address that is a multiple of 4096.
    nbytes: its size. The memory behind it, up to the next multiple of 4096, may be read too.
    """

    name: str
    ptr: int
    nbytes: int
    dtype: str


@dataclass(slots=True)
class TierStats:
    """The state of a tier: bytes, unless said otherwise.

    The `records` records take `used` of `capacity` now, and took `peak` at most. All `files` files take `reserved`;
    some of them wait to be used again. `written` went to the drive, `read` came from it, and `failures` operations
    ended in an error. `direct`: whether files are opened for direct I/O.

    state: "failing" after a failed write until one succeeds; "budget spent" where the last requested write was more
    than the rest of the write budget; else "ok". drives: how many do its operations side by side; of several, any
    that fails counts as "failing".
    """

    capacity: int
    direct: bool = False
    used: int = 0
    reserved: int = 0
    peak: int = 0
    records: int = 0
    files: int = 0
    written: int = 0
    read: int = 0
    failures: int = 0
    state: State = "ok"
    drives: int = 1

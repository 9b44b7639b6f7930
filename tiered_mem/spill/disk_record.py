"""A record of the disk tier and its file, and the gate that its writes pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from ..sizes import format_bytes
from .lower_tier import Job, State
from .record import ALIGNMENT, Header, Layout

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0


@dataclass(slots=True, eq=False)
class DiskRecord:
    """One file's worth of memory, on its way to the drive or there.

    header: without checksums until it is written. job: the write; once it is done without an error, the record is
    on the drive. The rest is the tier's.
    """

    header: Header
    layout: Layout
    claim: Claim
    job: Job = field(init=False)
    encoded: bytes = b""
    file: SpillFile | None = None
    operations: int = 1
    counted: bool = True
    released: bool = False
    sound: bool = True

    @property
    def number(self) -> int:
        """No other record of the tier has it."""
        return self.header.number

    @property
    def nbytes(self) -> int:
        """The size of its file."""
        return self.layout.file_bytes

    @property
    def cost(self) -> int:
        """The most bytes that writing it takes, with the zeros that first end the older record in its file."""
        return self.nbytes + ALIGNMENT


@dataclass(slots=True, eq=False)
class Claim:
    """Room for a file of `nbytes`: a free file, others to remove, and `extra` bytes that belong to no file."""

    nbytes: int
    reused: SpillFile | None
    drop: list[SpillFile]
    extra: int = 0

    def growth(self) -> int:
        return max(0, self.nbytes - (self.reused.nbytes if self.reused is not None else 0))

    def to_drop(self) -> int:
        return sum(file.nbytes for file in self.drop)


@dataclass(slots=True, eq=False)
class SpillFile:
    """A file of a spill folder.

    nbytes: its length, or the limit of it. identity: of its last whole write, None before that. fd: below 0 but
    while it is written.
    """

    name: str
    nbytes: int = 0
    identity: Identity | None = None
    fd: int = -1


class Identity(NamedTuple):
    """Tells a file from any other, and from itself after its length was changed."""

    device: int
    inode: int
    owner: int
    links: int
    nbytes: int


class WriteGate:
    """Counts written bytes, and pauses writing after a failure: for 1 s, then twice as long each time, up to 60 s.

    Each write that begins gets the number of its attempt, and hands it back at its end. Of writes that were under
    way together only the first failure counts, and only a write that began after it shows that all is well again.
    Not thread-safe.

    budget: the bytes that may ever be written, or None. clock: seconds.
    """

    def __init__(self, budget: int | None, clock: Callable[[], float]) -> None:
        self._budget = budget
        self._clock = clock
        self._promised = 0
        self._spent = False
        self._told = False
        self._pause = self._until = 0.0
        self._attempt = 0
        self._error = ""
        self.written = 0

    @property
    def state(self) -> State:
        """As in `TierStats`."""
        return "budget spent" if self._spent else "failing" if self._pause else "ok"

    def refusal(self, nbytes: int) -> str | None:
        """The reason why a write of `nbytes` may not begin now, with advice; None if it may."""
        total = self.written + self._promised + nbytes
        self._spent = self._budget is not None and total > self._budget
        if self._budget is not None and self._spent:
            return (
                f"of the write budget of {format_bytes(self._budget)}, {format_bytes(total - nbytes)} are spent; "
                "raise it if the drive may wear more"
            )
        if self._pause and (left := self._until - self._clock()) > 0:
            return f"writing is tried again in {left:.1f} s, as it failed: {self._error}"
        return None

    def budget_news(self) -> bool:
        """Whether the budget was too small for the first time."""
        news = self._spent and not self._told
        self._told = self._told or news
        return news

    def begin(self, nbytes: int) -> int:
        """A write of at most `nbytes` begins. Returns the number of its attempt."""
        self._promised += nbytes
        return self._attempt

    def cancel(self, nbytes: int) -> None:
        """A write of at most `nbytes` was cancelled before it began."""
        self._promised -= nbytes

    def succeeded(self, attempt: int, nbytes: int, written: int) -> bool:
        """A write of at most `nbytes` has written `written`. Returns whether that ends a pause."""
        self._count(nbytes, written)
        news = self._pause > 0 and attempt == self._attempt
        if news:
            self._pause = 0.0
        return news

    def failed(self, attempt: int, nbytes: int, written: int, error: BaseException) -> bool:
        """A write of at most `nbytes` has failed after `written`. Returns whether writing worked before."""
        self._count(nbytes, written)
        if attempt != self._attempt:
            return False
        news = not self._pause
        self._attempt += 1
        self._pause = min(2 * self._pause or _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self._until = self._clock() + self._pause
        self._error = str(error) or type(error).__name__
        return news

    def _count(self, promised: int, written: int) -> None:
        self._promised -= promised
        self.written += written

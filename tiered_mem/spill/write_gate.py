"""Decides by the write budget and the last failure whether a write may begin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from ..sizes import format_bytes

State = Literal["ok", "failing", "budget spent"]

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0


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
        """As in `DiskStats`."""
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

"""When a drive may be written to: not for a while after a failure, and not beyond a budget."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..sizes import format_bytes
from .lower_tier import State
from .room import SharedBytes

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0


class WriteGate:
    """Counts written bytes, and pauses writing after a failure: for 1 s, then twice as long each time, up to 60 s.

    Each write that begins gets the number of its attempt, and hands it back at its end. Of writes that were under
    way together only the first failure counts, and only a write that began after it shows that all is well again.
    Not thread-safe.

    budget: may be shared with other gates. clock: seconds.
    """

    def __init__(self, budget: WriteBudget, clock: Callable[[], float]) -> None:
        self._budget = budget
        self._clock = clock
        self._pause = self._until = 0.0
        self._attempt = 0
        self._error = ""
        self.written = 0

    @property
    def state(self) -> State:
        """As in `TierStats`."""
        return "budget spent" if self._budget.spent else "failing" if self._pause else "ok"

    def refusal(self, nbytes: int) -> str | None:
        """The reason why a write of `nbytes` may not begin now, with advice; None if it may."""
        spent = self._budget.refusal(nbytes)
        if spent is not None:
            return spent
        if self._pause and (left := self._until - self._clock()) > 0:
            return f"writing is tried again in {left:.1f} s, as it failed: {self._error}"
        return None

    def budget_news(self) -> bool:
        """Whether the budget was too small for the first time."""
        return self._budget.news()

    def begin(self, nbytes: int) -> int:
        """A write of at most `nbytes` begins. Returns the number of its attempt. Raises what `promise` does."""
        self._budget.promise(nbytes)
        return self._attempt

    def cancel(self, nbytes: int) -> None:
        """A write of at most `nbytes` was cancelled before it began."""
        self._budget.settle(nbytes, 0)

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
        self._budget.settle(promised, written)
        self.written += written


class WriteBudget:
    """The bytes that may ever be written, to one drive or to several together. Thread-safe.

    limit: None is no limit. shared: of what other processes have a part, too.
    spent: whether the last write that was asked for was more than the rest.
    """

    def __init__(self, limit: int | None, shared: SharedBytes | None = None) -> None:
        self._limit = limit
        self._shared = shared
        self._lock = threading.Lock()
        self._promised = 0
        self._written = 0
        self._told = False
        self.spent = False

    def refusal(self, nbytes: int) -> str | None:
        """The reason why there is no write of `nbytes` any more, with advice; None if there is."""
        with self._lock:
            begun = self._written + self._promised
            refusal = None
            if self._limit is not None and begun + nbytes > self._limit:
                refusal = (
                    f"of the write budget of {format_bytes(self._limit)}, {format_bytes(begun)} are spent; "
                    "raise it if the drive may wear more"
                )
            elif self._shared is not None and nbytes > self._shared.free():
                refusal = self._shared.advice()
            self.spent = refusal is not None
            return refusal

    def news(self) -> bool:
        """Whether it was too small for the first time."""
        with self._lock:
            news = self.spent and not self._told
            self._told = self._told or news
            return news

    def promise(self, nbytes: int) -> None:
        """A write of at most `nbytes` begins. Raises TierFull where other processes have just taken the rest."""
        with self._lock:
            if self._shared is not None and not self._shared.take(nbytes):
                raise self._shared.full(nbytes)
            self._promised += nbytes

    def settle(self, promised: int, written: int) -> None:
        """A write of at most `promised` has ended, with so many bytes written."""
        with self._lock:
            self._promised -= promised
            self._written += written
            if self._shared is not None:
                self._shared.give(promised - written)

"""How busy a drive is, and how fast."""

from __future__ import annotations

import threading

# After so many seconds of work what was before counts half.
_REMEMBERED_S = 4.0


class Pace:
    """Counts a drive's bytes: those under way, and those that it has moved while it was busy. Thread-safe.

    Operations may go on side by side; a second in which several do is one second.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way = 0
        self._nbytes = 0.0
        self._seconds = 0.0
        # The last time of work without a pause.
        self._began = self._ended = 0.0

    @property
    def under_way(self) -> int:
        """The bytes of operations that were asked for and have not ended."""
        return self._under_way

    @property
    def rate(self) -> float | None:
        """Bytes per second of late; None before anything has ended."""
        with self._lock:
            return self._nbytes / self._seconds if self._nbytes and self._seconds > 0 else None

    def begin(self, nbytes: int) -> None:
        """An operation of so many bytes was asked for."""
        with self._lock:
            self._under_way += nbytes

    def give_up(self, nbytes: int) -> None:
        """It was given up before it began."""
        with self._lock:
            self._under_way -= nbytes

    def end(self, nbytes: int, moved: int, began: float, ended: float) -> None:
        """It has moved so many of its bytes, between these times."""
        with self._lock:
            self._under_way -= nbytes
            self._nbytes += moved
            if began > self._ended:
                self._began = self._ended = began
            self._seconds += max(0.0, self._began - began) + max(0.0, ended - self._ended)
            self._began, self._ended = min(self._began, began), max(self._ended, ended)
            if self._seconds > _REMEMBERED_S:
                self._seconds /= 2
                self._nbytes /= 2

"""The lock of a manager."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from .block import Block


class Turn:
    """Inside, the bookkeeping of a manager and the issuing of copies are one thread's alone. Not reentrant.

    A saved tensor may die anywhere, even in the middle of the code that has the turn. So its block is only put on a
    list, for whoever has the turn, or else has it next.

    bury: called for each block on the list, in turn.
    """

    def __init__(self, bury: Callable[[Block], None]) -> None:
        self._bury = bury
        self._lock = threading.Lock()
        self._let_go: deque[Block] = deque()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()
        if self._let_go:
            self._bury_all()

    def let_go(self, block: Block) -> None:
        """One saved tensor less needs the block. May be called from anywhere, from `__del__` too."""
        self._let_go.append(block)
        self._bury_all()

    def _bury_all(self) -> None:
        """Whoever finds the lock free does it; who does not leaves it to the lock's holder, who comes here next."""
        while self._let_go and self._lock.acquire(blocking=False):
            try:
                while self._let_go:
                    self._bury(self._let_go.popleft())
            finally:
                self._lock.release()

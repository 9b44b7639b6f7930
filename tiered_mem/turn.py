"""The lock of a manager."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from threading import get_ident

from .block import Block
from .errors import Reentered
from .interrupts import Interrupts


class Turn:
    """Inside, the bookkeeping of a manager and the issuing of copies are one thread's alone. Not reentrant.

    A saved tensor may die anywhere, even in the middle of the code that has the turn. So its block is only put on a
    list, for whoever has the turn, or else has it next.

    Whoever takes the turn does so in a function that is `uninterrupted`.

    bury: called for each block on the list, in turn.
    interrupts: is asked to look for new handlers of signals.
    """

    def __init__(self, bury: Callable[[Block], None], interrupts: Interrupts) -> None:
        self._bury = bury
        self._interrupts = interrupts
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._let_go: deque[Block] = deque()

    def __enter__(self) -> None:
        """Raises Reentered for the thread that has the turn, which would wait for itself."""
        self._interrupts.watch()
        me = get_ident()
        if self._owner == me:
            raise Reentered("the manager was called by code that it was running itself, such as a policy's")
        self._lock.acquire()
        self._owner = me

    def __exit__(self, *error: object) -> None:
        self._owner = None
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
            self._owner = get_ident()
            try:
                while self._let_go:
                    self._bury(self._let_go.popleft())
            finally:
                self._owner = None
                self._lock.release()

"""The lock of a manager."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import Generic, TypeVar

from ..errors import Reentered
from .interrupts import Interrupts

_Block = TypeVar("_Block")


class Turn(Generic[_Block]):
    """Inside, the bookkeeping of a manager and the issuing of copies are one thread's alone. Not reentrant.

    A saved tensor may die anywhere, even in the middle of the code that has the turn. So its block is only put on a
    list, for whoever has the turn, or else has it next.

    Whoever takes the turn does so in a function that is `uninterrupted`.

    drop: called for each block on the list, in turn.
    interrupts: is asked to look for new handlers of signals, but by `take`: saved tensors come by thousands.
    """

    def __init__(self, drop: Callable[[_Block], None], interrupts: Interrupts) -> None:
        self._drop = drop
        self._interrupts = interrupts
        self._lock = threading.Lock()
        self._owner: int | None = None
        # Blocks that a saved tensor less needs, put here from anywhere, before `free_dropped` is called.
        self.dropped: deque[_Block] = deque()

    def __enter__(self) -> None:
        """Raises Reentered for the thread that has the turn, which would wait for itself."""
        self._interrupts.watch()
        self.take()

    def __exit__(self, *error: object) -> None:
        self.give()

    @property
    def mine(self) -> bool:
        """Whether this thread has the turn."""
        return self._owner == get_ident()

    def take(self) -> None:
        """Takes the turn until `give`. Raises Reentered."""
        me = get_ident()
        if self._owner == me:
            raise Reentered("the manager was called by code that it was running itself, such as a policy's")
        self._lock.acquire()
        self._owner = me

    def give(self) -> None:
        """Gives the turn away."""
        self._owner = None
        self._lock.release()
        if self.dropped:
            self.free_dropped()

    def free_dropped(self) -> None:
        """Gives up what was dropped. May be called from anywhere, from `__del__` too.

        Whoever finds the lock free does it; who does not leaves it to the lock's holder, who comes here next.
        """
        while self.dropped and self._lock.acquire(blocking=False):
            self._owner = get_ident()
            try:
                while self.dropped:
                    self._drop(self.dropped.popleft())
            finally:
                self._owner = None
                self._lock.release()

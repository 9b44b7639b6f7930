"""Keeps signal handlers, and what they raise, out of the middle of the bookkeeping."""

from __future__ import annotations

import _thread
import signal
import threading
import time
import weakref

# signal.getsignal makes an enum of each answer, which takes ten times as long.
from _signal import getsignal  # type: ignore[import-not-found]
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, FunctionType
from typing import Any, Protocol, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])
Handler = Callable[[int, FrameType | None], Any]

# Seconds until a handler that came at a bad time comes again.
_AGAIN = 1e-3
_CODES: set[CodeType] = set()
_FREE: set[CodeType] = set()


def uninterrupted(function: F) -> F:
    """While the function runs in the main thread, no handler of a signal runs. A call costs nothing more."""
    _CODES.add(cast(FunctionType, function).__code__)
    return function


def interruptible(function: F) -> F:
    """While the function runs, handlers do run, whatever called it: it is the user's own code."""
    _FREE.add(cast(FunctionType, function).__code__)
    return function


# It runs what is to be done when an object dies, and an interrupt at its first instruction would be swallowed.
uninterrupted(weakref.finalize.__call__)


class Interrupts:
    """Makes the handlers of signals wait for functions that are `uninterrupted`.

    Python calls a handler in the main thread, between any two instructions, and whatever it raises comes out there:
    KeyboardInterrupt, SystemExit, a time limit's own error. In the middle of the bookkeeping that would leave a
    lock taken or lose a slot, and a handler that asks the manager would wait for itself. So each handler is put
    behind one that looks at the stack first, and comes again a little later if the time is bad. Without a signal
    that costs nothing.

    There is one for each manager. They share the handlers that they put in front.

    hold: False leaves all handlers alone.
    """

    def __init__(self, *, hold: bool = True) -> None:
        self._signals = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}) if hold else []
        self._known: list[object] = []
        self._leaving: list[weakref.ref[Leaving]] = []
        self._closed = False
        self._main = threading.main_thread().ident

    def watch(self) -> None:
        """Looks for handlers that are new. To be called now and then by the main thread; others need not."""
        if self._closed or threading.get_ident() != self._main:
            return
        handlers = list(map(getsignal, self._signals))
        if handlers != self._known:
            for number, handler in zip(self._signals, handlers, strict=True):
                self._hold_back(number, handler)
            self._known = list(map(getsignal, self._signals))

    def tell(self, leaving: Leaving) -> None:
        """From now on `leave` of it is called where a handler raises. Does not keep it."""
        self._leaving = [each for each in self._leaving if each() is not None] + [weakref.ref(leaving)]

    @uninterrupted
    def leave(self) -> None:
        """A handler has raised in the main thread, and what runs there is broken off."""
        for each in self._leaving:
            if (leaving := each()) is not None:
                leaving.leave()

    def close(self) -> None:
        """Puts back the handlers that no other manager holds back. Only the main thread can."""
        self._closed = True
        if threading.get_ident() != threading.main_thread().ident:
            return
        for number in self._signals:
            held = getsignal(number)
            if isinstance(held, HeldBack):
                held.users.discard(self)
                if not held.users:
                    signal.signal(number, held.handler)

    def _hold_back(self, number: int, handler: object) -> None:
        if isinstance(handler, HeldBack):
            handler.users.add(self)
        elif callable(handler):
            held = HeldBack(handler)
            held.users.add(self)
            signal.signal(number, held)


class Leaving(Protocol):
    """Has something under way in the main thread that hears of no end where an interrupt ends it."""

    def leave(self) -> None: ...


class HeldBack:
    """A handler that waits until the main thread is in no `uninterrupted` function.

    handler: the user's. users: the managers that need it to wait.
    """

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.users: weakref.WeakSet[Interrupts] = weakref.WeakSet()
        self._coming = False

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        if not any(keepers(frame)):
            try:
                return self.handler(number, frame)
            except BaseException:
                for user in list(self.users):
                    user.leave()
                raise
        if not self._coming:
            self._coming = True
            _thread.start_new_thread(self._come_again, (number,))
        return None

    def _come_again(self, number: int) -> None:
        time.sleep(_AGAIN)
        self._coming = False
        _thread.interrupt_main(number)  # type: ignore[arg-type]


def keepers(frame: FrameType | None) -> Iterator[CodeType]:
    """The functions that keep handlers waiting while this runs, the innermost first."""
    while frame is not None and frame.f_code not in _FREE:
        if frame.f_code in _CODES:
            yield frame.f_code
        frame = frame.f_back

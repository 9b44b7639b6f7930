"""What the ranks of a machine tell each other, once, of their device budgets."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ..ground.interrupts import uninterrupted
from .node_file import PID, NodeFile
from .node_share import VERDICT, named, who

# Of a record: what has been said, the bytes that the rank's step needs at least, and those that it has; and since
# when there is somebody who may say it, by which the next owner of the record is known for another one.
_SAID, _NEEDS, _HAS, _SINCE = range(VERDICT, VERDICT + 4)
# What has been said is nothing yet, or when the word was said. A record that nobody speaks in has 0.
_NOTHING_YET = 1
# How often somebody who waits looks.
_LOOK_S = 2e-3


@dataclass(frozen=True, order=True, slots=True)
class TooSmall:
    """A rank whose budget is too small. number: by which ranks are in order. needs, has: bytes of its device."""

    number: int
    process: int
    needs: int
    has: int

    def __str__(self) -> str:
        return named(self.number, self.process)


class NodeVerdicts:
    """One manager's part in an exchange in which each says whether its budget is enough, and hears all others.

    A manager takes part from `begin` on. Those that have begun when this one says its word are waited for. A record
    that its owner has given up, or left by dying, is not. A word from before this one's `begin` was for others.

    file: where this manager has a record.
    """

    def __init__(self, file: NodeFile) -> None:
        self._file = file
        # By place: since when, the number of the rank, and its process.
        self._heard: dict[int, tuple[int, int, int]] = {}

    @uninterrupted
    def begin(self) -> None:
        """From now on the others wait for this one's word."""
        if self._file.closed:
            return
        numbers, own = self._file.numbers, self._file.place
        with self._file.exclusive():
            numbers[own + _SINCE], numbers[own + _SAID] = time.monotonic_ns(), _NOTHING_YET

    def say(self, needs: int = 0, has: int = 0) -> None:
        """This one's word. needs: the bytes that its step takes at least, where it has less."""
        if self._file.closed:
            return
        numbers, own = self._file.numbers, self._file.place
        with self._file.exclusive():
            # Who they are is seen now: whoever has waited for this word may be gone when this one waits.
            since = numbers[own + _SINCE]
            places = [
                place
                for place in self._file.living()
                if numbers[place + _SAID] == _NOTHING_YET or numbers[place + _SAID] >= since
            ]
            self._heard = {
                place: (numbers[place + _SINCE], who(self._file, place), numbers[place + PID]) for place in places
            }
            numbers[own + _NEEDS], numbers[own + _HAS] = needs, has
            numbers[own + _SAID] = time.monotonic_ns()

    def wait(self, seconds: float) -> list[str]:
        """Waits for the words of all who had begun. Returns who has not said any by then, and lives."""
        end = time.monotonic() + seconds
        while (missing := self._missing()) and time.monotonic() < end:
            time.sleep(_LOOK_S)
        return missing

    def too_small(self) -> list[TooSmall]:
        """Those who have said that they need more than they have, in the order of the ranks."""
        if self._file.closed:
            return []
        numbers = self._file.numbers
        with self._file.exclusive():
            return sorted(
                TooSmall(number, process, numbers[place + _NEEDS], numbers[place + _HAS])
                for place, (since, number, process) in self._heard.items()
                if numbers[place + _SINCE] == since and numbers[place + _NEEDS]
            )

    @uninterrupted
    def _missing(self) -> list[str]:
        if self._file.closed:
            return []
        numbers = self._file.numbers
        with self._file.exclusive():
            self._file.living()  # the dead have no process afterwards
            return [
                named(number, process)
                for place, (since, number, process) in self._heard.items()
                if numbers[place + _SINCE] == since
                and numbers[place + _SAID] == _NOTHING_YET
                and numbers[place + PID]
            ]

"""The bytes of drives that several share: pools of files in a process, and processes of a machine."""

from __future__ import annotations

import threading
from typing import Protocol

from ..errors import TierFull


class Room:
    """The bytes that files may take, those of one pool or of several. Whoever calls a method has the lock.

    nbytes: the most that they may take together.
    shared: of what other processes have a part, too.
    """

    def __init__(self, nbytes: int, shared: SharedBytes | None = None) -> None:
        self.nbytes = nbytes
        self.lock = threading.Lock()
        self._taken = 0
        self._shared = shared

    def take(self, nbytes: int) -> bool:
        """Takes so many, or none."""
        if nbytes > self.nbytes - self._taken or (self._shared is not None and not self._shared.take(nbytes)):
            return False
        self._taken += nbytes
        return True

    def give(self, nbytes: int) -> None:
        """Gives back what was taken."""
        self._taken -= nbytes
        if self._shared is not None:
            self._shared.give(nbytes)

    def left(self) -> int:
        """How many could be taken now."""
        left = self.nbytes - self._taken
        return left if self._shared is None else min(left, self._shared.free())

    def used(self) -> int:
        """How many all have taken, other processes too."""
        return self._taken if self._shared is None else self._shared.used()

    def advice(self, growth: int) -> str:
        """What helps where the files cannot become longer by so many bytes."""
        if self._shared is not None and growth <= self.nbytes - self._taken:
            return self._shared.advice()
        return "raise spill_bytes, or offload less"


class SharedBytes(Protocol):
    """Bytes that processes share: what one has taken others cannot have. The caller has a lock for its calls."""

    @property
    def limit(self) -> int:
        """The most that there may be."""

    def take(self, nbytes: int) -> bool:
        """Take so many, or none."""

    def give(self, nbytes: int) -> None:
        """Give back what was taken."""

    def free(self) -> int:
        """How many could be taken now."""

    def used(self) -> int:
        """How many all have taken."""

    def full(self, needed: int) -> TierFull:
        """The error for too few."""

    def advice(self) -> str:
        """What helps where there are too few."""


class SharedDrives(Protocol):
    """What processes share of drives: `spill` of the bytes of files, and `writes` of those that may be written."""

    @property
    def spill(self) -> SharedBytes | None: ...
    @property
    def writes(self) -> SharedBytes | None: ...

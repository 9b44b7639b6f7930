"""Counts of things and their bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Moved:
    """A number of things and their bytes, since the manager was made."""

    count: int = 0
    nbytes: int = 0

    def add(self, nbytes: int) -> None:
        self.count += 1
        self.nbytes += nbytes

    def take_back(self, nbytes: int) -> None:
        """Takes out one that was added."""
        self.count -= 1
        self.nbytes -= nbytes

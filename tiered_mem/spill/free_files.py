"""Files of no record."""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter

from .folder_files import SpillFile


class FreeFiles:
    """Files that can be used again, by size, and others that are to be removed. Not thread-safe."""

    def __init__(self) -> None:
        self._usable: list[SpillFile] = []  # from the smallest to the largest
        self._doomed: list[SpillFile] = []
        self.nbytes = 0

    def add(self, file: SpillFile) -> None:
        """Adds a file that can be used again."""
        insort(self._usable, file, key=_nbytes)
        self.nbytes += file.nbytes

    def doom(self, file: SpillFile) -> None:
        """Adds a file that is to be removed."""
        self._doomed.append(file)
        self.nbytes += file.nbytes

    def take_best(self, nbytes: int) -> SpillFile | None:
        """Takes the smallest usable file of that size or more, else the largest; None if there is none."""
        if not self._usable:
            return None
        return self._take(min(bisect_left(self._usable, nbytes, key=_nbytes), len(self._usable) - 1))

    def take_largest(self) -> SpillFile:
        """Takes the largest usable file. Raises IndexError where there is none."""
        return self._take(-1)

    def take_usable(self) -> list[SpillFile]:
        """Takes all files that can be used again."""
        taken, self._usable = self._usable, []
        self.nbytes -= sum(map(_nbytes, taken))
        return taken

    def take_doomed(self) -> list[SpillFile]:
        """Takes all files that are to be removed."""
        taken, self._doomed = self._doomed, []
        self.nbytes -= sum(map(_nbytes, taken))
        return taken

    def _take(self, index: int) -> SpillFile:
        file = self._usable.pop(index)
        self.nbytes -= file.nbytes
        return file


_nbytes = attrgetter("nbytes")

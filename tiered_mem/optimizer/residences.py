"""Where the states of one optimizer rest."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

from ..errors import TierFull
from ..spill.disk_tier import DiskTier
from ..tiers import HostTier
from .disk_residence import DiskResidence
from .residence import Exclusive, HostResidence, Residence
from .staging import Staging


class Residences(Protocol):
    """Makes residences for buckets."""

    def make(self, sizes: Sequence[int]) -> list[Residence]:
        """One for each number of bytes. Raises TierFull; then there is none."""

    def progress(self) -> None:
        """Goes on with what can go on. Does not wait."""

    def settle(self) -> None:
        """Waits until every file is written."""

    def close(self) -> None:
        """Waits for what is under way. The residences are released before."""


class HostResidences:
    """Host memory, a part for each bucket."""

    def __init__(self, host: HostTier, exclusive: Exclusive) -> None:
        self._host = host
        self._exclusive = exclusive

    def make(self, sizes: Sequence[int]) -> list[Residence]:
        made: list[Residence] = []
        try:
            for nbytes in sizes:
                made.append(HostResidence(self._host, self._exclusive, nbytes))
        except BaseException:
            for residence in made:
                residence.release()
            raise
        return made

    def progress(self) -> None:
        """Nothing is under way but copies."""

    def settle(self) -> None:
        """There is no file."""

    def close(self) -> None:
        """There is nothing to wait for."""


class DiskResidences:
    """Records of the disk tier, by way of a few slots of host memory.

    usual_bytes: the size of a bucket of more than one parameter. Larger ones share slots of their own.
    """

    def __init__(self, host: HostTier, disk: DiskTier, exclusive: Exclusive, usual_bytes: int) -> None:
        self._host = host
        self._disk = disk
        self._exclusive = exclusive
        self._usual_bytes = usual_bytes
        self._stagings: list[Staging] = []
        self._numbers = itertools.count()

    def make(self, sizes: Sequence[int]) -> list[Residence]:
        self._check_room(sum(sizes))
        large = self._staging([size for size in sizes if size > self._usual_bytes], _SLOTS_FOR_LARGE)
        try:
            usual = self._staging([size for size in sizes if size <= self._usual_bytes], _SLOTS)
        except BaseException:
            if large is not None:
                large.close()
            raise
        made: list[Residence] = []
        for size in sizes:
            staging = large if size > self._usual_bytes else usual
            if staging is not None:
                made.append(DiskResidence(staging, size, f"states.{next(self._numbers)}"))
        self._stagings += [staging for staging in (large, usual) if staging is not None]
        return made

    def progress(self) -> None:
        for staging in self._stagings:
            staging.progress()

    def settle(self) -> None:
        for staging in self._stagings:
            staging.settle()

    def close(self) -> None:
        for staging in self._stagings:
            staging.close()

    def _staging(self, sizes: Sequence[int], slots: int) -> Staging | None:
        if not sizes:
            return None
        return Staging(self._host, self._disk, self._exclusive, max(sizes), min(slots, len(sizes)))

    def _check_room(self, nbytes: int) -> None:
        if nbytes > self._disk.capacity:
            used = self._disk.stats().used
            raise TierFull(
                "disk",
                needed=nbytes,
                free=self._disk.capacity - used,
                used=used,
                limit=self._disk.capacity,
                advice="it is for optimizer states: raise spill_bytes, or put them on the host",
            )


# Some are read, one is stepped, the next is on the device already, and some are written.
_SLOTS = 8
_SLOTS_FOR_LARGE = 3

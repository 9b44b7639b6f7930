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

    def step_begins(self) -> None:
        """What is written from now on is of the next step."""

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

    def step_begins(self) -> None:
        """Nothing is written."""

    def progress(self) -> None:
        """Nothing is under way but copies."""

    def settle(self) -> None:
        """There is no file."""

    def close(self) -> None:
        """There is nothing to wait for."""


class DiskResidences:
    """Records of the disk tier, by way of a few slots of host memory.

    usual_bytes: buckets that are larger share slots of their own.
    """

    def __init__(self, host: HostTier, disk: DiskTier, exclusive: Exclusive, usual_bytes: int) -> None:
        self._host = host
        self._disk = disk
        self._exclusive = exclusive
        self._usual_bytes = usual_bytes
        self._stagings: list[Staging] = []
        self._numbers = itertools.count()
        self._step = 0

    def make(self, sizes: Sequence[int]) -> list[Residence]:
        self._check_room(sum(sizes))
        new: list[Staging] = []
        try:
            for some, slots in (
                ([size for size in sizes if size > self._usual_bytes], _SLOTS_FOR_LARGE),
                ([size for size in sizes if size <= self._usual_bytes], _SLOTS),
            ):
                if some and self._staging_for(max(some)) is None:
                    new.append(Staging(self._host, self._disk, self._exclusive, max(some), min(slots, len(some))))
        except BaseException:
            for staging in new:
                staging.close()
            raise
        self._stagings = sorted([*self._stagings, *new], key=lambda staging: staging.slot_bytes)
        self._tell_step()
        return [self._residence(size) for size in sizes]

    def step_begins(self) -> None:
        self._step += 1
        self._tell_step()

    def progress(self) -> None:
        for staging in self._stagings:
            staging.progress()

    def settle(self) -> None:
        for staging in self._stagings:
            staging.settle()

    def close(self) -> None:
        for staging in self._stagings:
            staging.close()

    def _tell_step(self) -> None:
        for staging in self._stagings:
            staging.step = self._step

    def _residence(self, nbytes: int) -> Residence:
        staging = self._staging_for(nbytes)
        if staging is None:
            raise RuntimeError(f"no slot is large enough for {nbytes} bytes")
        return DiskResidence(staging, nbytes, f"states.{next(self._numbers)}")

    def _staging_for(self, nbytes: int) -> Staging | None:
        """The one with the smallest slots that are large enough."""
        return next((staging for staging in self._stagings if staging.slot_bytes >= nbytes), None)

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

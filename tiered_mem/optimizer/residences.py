"""Where the states of one optimizer rest."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

from ..allocators import round_up
from ..errors import TierFull
from ..sizes import format_bytes
from ..spill.disk_tier import DiskTier
from ..tiers import HostTier
from .disk_residence import DiskResidence
from .residence import Exclusive, HostResidence, Residence
from .staging import Staging


class Residences(Protocol):
    """Makes residences for buckets."""

    def make(self, sizes: Sequence[int]) -> list[Residence]:
        """One for each number of bytes. Raises TierFull; then there is none."""

    def host_bytes(self, resting: int) -> int:
        """The host memory that is taken. resting: the bytes of all residences."""

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

    def host_bytes(self, resting: int) -> int:
        return resting

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
        self._made: list[DiskResidence] = []
        self._numbers = itertools.count()
        self._step = 0

    def make(self, sizes: Sequence[int]) -> list[Residence]:
        self._check_room(sum(sizes))
        self._close_idle()
        wanted = [
            (max(some), min(slots, len(some)))
            for some, slots in (
                ([size for size in sizes if size > self._usual_bytes], _SLOTS_FOR_LARGE),
                ([size for size in sizes if size <= self._usual_bytes], _SLOTS),
            )
            if some and self._staging_for(max(some)) is None
        ]
        with self._exclusive:
            used = self._host.pool_stats().used
        new: list[Staging] = []
        try:
            for slot_bytes, slots in wanted:
                new.append(Staging(self._host, self._disk, self._exclusive, slot_bytes, slots))
        except BaseException as error:
            for staging in new:
                staging.close()
            if isinstance(error, TierFull):
                raise _too_little(error, used, wanted) from None
            raise
        self._stagings = sorted([*self._stagings, *new], key=lambda staging: staging.slot_bytes)
        self._tell_step()
        made = [self._residence(size) for size in sizes]
        self._made += made
        return list(made)

    def host_bytes(self, resting: int) -> int:
        return sum(staging.slots * staging.slot_bytes for staging in self._stagings)

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

    def _residence(self, nbytes: int) -> DiskResidence:
        staging = self._staging_for(nbytes)
        if staging is None:
            raise RuntimeError(f"no slot is large enough for {nbytes} bytes")
        return DiskResidence(staging, nbytes, f"states.{next(self._numbers)}")

    def _close_idle(self) -> None:
        """Gives back the slots through which no bucket passes any more."""
        self._made = [residence for residence in self._made if not residence.released]
        for staging in [*self._stagings]:
            if all(residence.staging is not staging for residence in self._made):
                self._stagings.remove(staging)
                staging.close()

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


def _too_little(error: TierFull, used: int, wanted: Sequence[tuple[int, int]]) -> TierFull:
    """The same error, with what would have been enough."""
    enough = used + sum(slots * round_up(slot_bytes) for slot_bytes, slots in wanted)
    parts = " and ".join(f"{slots} of {format_bytes(slot_bytes)}" for slot_bytes, slots in wanted)
    return TierFull(
        "host",
        needed=error.needed,
        free=error.free,
        used=error.used,
        limit=error.limit,
        advice=(
            f"optimizer states pass through slots of host memory on their ways to disk and back, {parts}: "
            f"host_bytes={enough} ({format_bytes(enough)}) is the least that will do, or lower bucket_bytes"
        ),
    )


# Some are read, one is stepped, the next is on the device already, and some are written.
_SLOTS = 8
_SLOTS_FOR_LARGE = 3

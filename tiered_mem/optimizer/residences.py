"""Which parameters' states move together, and the host memory and the disk in which they rest."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence

from ..allocators.base import round_up
from ..errors import TierFull
from ..sizes import format_bytes
from ..spill.lower_tier import LowerTier
from ..tiers.host_tier import HostTier
from ..tiers.shelf import Exclusive, FixedSlots, Shelf
from .bucket import Bucket, Residence
from .layout import Param, StateLayout

_log = logging.getLogger("tiered_mem.optimizer")
# Some are read, one is stepped, the next is on the device already, and some are written.
_SLOTS = 8
_SLOTS_FOR_LARGE = 3


class Residences:
    """Makes residences for buckets: on disk, by way of a few slots of host memory, or on the host, each in its own.

    A shelf has slots of one size. They are reserved when buckets are housed, and are there until the last of them
    is released: a step does not depend on what room the host tier has.

    disk: None for the host.
    bucket_bytes: half of the device memory that states pass through in a step, a parameter aside whose state is
    larger. Buckets on disk that are larger share slots of their own.
    host_share: of what is free in the host tier, what buckets take before others go to disk.
    """

    def __init__(
        self,
        host: HostTier,
        disk: LowerTier | None,
        exclusive: Exclusive,
        bucket_bytes: int,
        host_share: float = 0.0,
    ) -> None:
        self._host = host
        self._disk = disk
        self._exclusive = exclusive
        self.bucket_bytes = bucket_bytes
        self._host_share = host_share
        self._shelves: list[Shelf] = []
        self._numbers = itertools.count()
        self._step = 0

    def house(self, buckets: Sequence[Bucket]) -> None:
        """Gives each bucket that has anything to move a residence. Raises TierFull; then none has got one."""
        self._shelves = [shelf for shelf in self._shelves if shelf.slots.count]
        moving = [bucket for bucket in buckets if bucket.nbytes]
        sizes = [bucket.nbytes for bucket in moving]
        if self._disk is None:
            advice = "it is for optimizer states: raise host_bytes, or put them on disk"
            shelves = self._build([(size, 1) for size in sizes], advice)
        else:
            on_host = self._on_host(sizes)
            rest = sizes[on_host:]
            self._check_disk(self._disk, sum(rest))
            wanted = self._missing(rest)
            self._build(wanted, self._advice(wanted), self._disk)
            shelves = self._build([(size, 1) for size in sizes[:on_host]], "")
            shelves += [self._fitting(size)[0] for size in rest]
        for bucket, shelf in zip(moving, shelves, strict=True):
            bucket.residence = Residence(shelf, bucket.nbytes, f"states.{next(self._numbers)}")

    def house_anew(self, bucket: Bucket, name: str) -> bool:
        """As `house` for states that have changed their shapes. False without room for them, and they stay.

        name: of the optimizer.
        """
        try:
            self.house([bucket])
        except TierFull as error:
            _log.warning(
                "%s of states of %s have changed their shapes, and stay on the device: %s",
                *(format_bytes(bucket.nbytes), name, str(error)),
            )
            return False
        return True

    @property
    def host_bytes(self) -> int:
        """The host memory that is taken."""
        return sum(shelf.slots.count * shelf.slots.nbytes for shelf in self._shelves)

    def step_begins(self) -> None:
        """What is written from now on is of the next step."""
        self._step += 1
        for shelf in self._shelves:
            shelf.step = self._step

    def poll(self) -> None:
        """Goes on with files that can go on. Does not wait."""
        if self._disk is not None:
            for shelf in self._shelves:
                shelf.poll()

    def wait(self) -> None:
        """Waits until every file is written."""
        for shelf in self._shelves:
            shelf.poll()
            while shelf.wait():
                pass

    def close(self) -> None:
        """Gives all host memory back."""
        for shelf in self._shelves:
            shelf.close()

    def _on_host(self, sizes: Sequence[int]) -> int:
        """How many of the buckets, from the first on, the host tier has room for."""
        with self._exclusive:
            stats = self._host.pool_stats()
        if not self._host_share or stats.capacity is None:
            return len(sizes) if self._host_share else 0
        taken = itertools.accumulate(round_up(size) for size in sizes)
        room = (stats.capacity - stats.used) * self._host_share
        return sum(nbytes <= room for nbytes in taken)

    def _build(self, wanted: Sequence[tuple[int, int]], advice: str, disk: LowerTier | None = None) -> list[Shelf]:
        """Shelves with slots of so many bytes, and so many of them. Raises TierFull; then there is none."""
        slots: list[FixedSlots] = []
        try:
            for nbytes, count in wanted:
                slots.append(FixedSlots(self._host, self._exclusive, nbytes, count, advice))
        except BaseException:
            for each in slots:
                each.close()
            raise
        new = [Shelf(each, disk, "optimizer", self._step) for each in slots]
        self._shelves = sorted([*self._shelves, *new], key=lambda shelf: shelf.slots.nbytes)
        return new

    def _missing(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """The size of the slots, and their number, of the shelves that are to be there for these buckets."""
        large = [size for size in sizes if size > self.bucket_bytes]
        usual = [size for size in sizes if size <= self.bucket_bytes]
        return [
            (max(some), min(slots, len(some)))
            for some, slots in ((large, _SLOTS_FOR_LARGE), (usual, _SLOTS))
            if some and not self._fitting(max(some))
        ]

    def _fitting(self, nbytes: int) -> list[Shelf]:
        """Those before the disk with slots that are large enough, the smallest first."""
        return [shelf for shelf in self._shelves if shelf.slots.nbytes >= nbytes and shelf.to_disk]

    def _advice(self, wanted: Sequence[tuple[int, int]]) -> str:
        with self._exclusive:
            used = self._host.pool_stats().used
        enough = used + sum(slots * round_up(nbytes) for nbytes, slots in wanted)
        parts = " and ".join(f"{slots} of {format_bytes(nbytes)}" for nbytes, slots in wanted)
        return (
            f"optimizer states pass through slots of host memory on their ways to disk and back, {parts}: "
            f"host_bytes={enough} ({format_bytes(enough)}) is the least that will do, or lower bucket_bytes"
        )

    def _check_disk(self, disk: LowerTier, nbytes: int) -> None:
        stats = disk.stats()
        used, limit = stats.used, stats.capacity
        if nbytes > limit:
            advice = "it is for optimizer states: raise spill_bytes, or put them on the host"
            raise TierFull("disk", needed=nbytes, free=limit - used, used=used, limit=limit, advice=advice)


def pack(params: Iterable[tuple[Param, StateLayout]], limit: int, *, in_order: bool = False) -> list[Bucket]:
    """Buckets for parameters and states of these layouts, of at most `limit` bytes unless one alone is larger.

    Each goes to the first bucket that has room, as the small ones between large ones would make many small buckets.
    Parameters whose state has nothing that moves are in a bucket of 0 bytes, if any. in_order: all parameters stay
    in the order in which they are given, whatever room is lost.
    """
    buckets: list[Bucket] = []
    with_room: list[Bucket] = []
    still = Bucket()
    for param, layout in params:
        if not layout.room and not in_order:
            still.add(param, layout)
            continue
        for bucket in with_room:
            if not layout.room or not bucket.room or bucket.room + layout.room <= limit:
                break
        else:
            bucket = Bucket()
            buckets.append(bucket)
            with_room = [bucket] if in_order else [*with_room, bucket]
        bucket.add(param, layout)
        if bucket.room >= limit and not in_order:
            with_room.remove(bucket)
    return [*buckets, still] if still.params else buckets

"""How fast a disk tier writes and reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ParamSpec

from ..allocators import PageableMemory, SlabPool
from ..policies import Link
from ..spill.lower_tier import Job, LowerTier, Piece, Record
from ..spill.record import ALIGNMENT

P = ParamSpec("P")

# As many as the tier has threads.
_RECORDS = 4
_RECORD_BYTES = 8 << 20


def measured_drive(disk: LowerTier) -> Link:
    """Writes several files at once, reads them, and does both: 96 and 64 MiB, or less for a tier that is small.

    Raises TierFull where the tier takes nothing, and OSError where the drive fails.
    """
    nbytes = max(1, min(_RECORD_BYTES, disk.stats().capacity // (8 * _RECORDS)) // ALIGNMENT) * ALIGNMENT
    size = 2 * _RECORDS * nbytes
    with SlabPool(PageableMemory(), size, size) as pool:
        region = pool.allocate(size)
        places = range(region.ptr, region.ptr + size, nbytes)
        trial = _Trial(disk, places[:_RECORDS], places[_RECORDS:], nbytes)
        try:
            return trial.link()
        finally:
            trial.close()
            pool.deallocate(region)


class _Trial:
    """Records of `nbytes` bytes each, from memory at the addresses `sources`, and back to `targets`."""

    def __init__(self, disk: LowerTier, sources: Sequence[int], targets: Sequence[int], nbytes: int) -> None:
        self._disk = disk
        self._sources = sources
        self._targets = targets
        self._nbytes = nbytes
        self._jobs: list[Job] = []
        self._records: list[Record] = []

    def link(self) -> Link:
        self._write([ALIGNMENT])
        self._wait()
        latency = self._timed(self._read, self._records)
        wanted = [self._nbytes] * _RECORDS
        self._write(wanted)
        self._wait()
        self._release()  # the next ones have the files of these, as in all steps but the first
        write = self._timed(self._write, wanted)
        written = list(self._records)
        read = self._timed(self._read, written)
        both = self._timed(self._write_and_read, wanted, written)
        size = _RECORDS * self._nbytes
        share = min(1.0, 2 * size / both / (size / write + size / read))
        return Link(size / write, size / read, both=share, latency=latency)

    def close(self) -> None:
        for job in self._jobs:
            job.wait()
        self._release()

    def _timed(self, begin: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> float:
        began = self._disk.now()
        begin(*args, **kwargs)
        self._wait()
        return max(self._disk.now() - began, 1e-9)

    def _write(self, sizes: Sequence[int]) -> None:
        for ptr, nbytes in zip(self._sources, sizes, strict=False):
            self._records.append(self._disk.write([Piece("trial", ptr, nbytes, "uint8")], step=0, kind="trial"))
            self._jobs.append(self._records[-1].job)

    def _read(self, records: Sequence[Record]) -> None:
        self._jobs += [
            self._disk.read(record, [(0, ptr)]) for record, ptr in zip(records, self._targets, strict=False)
        ]

    def _write_and_read(self, sizes: Sequence[int], records: Sequence[Record]) -> None:
        self._write(sizes)
        self._read(records)

    def _wait(self) -> None:
        """Until all is done. Raises the error of what failed."""
        for job in self._jobs:
            job.wait()
        errors = [job.error for job in self._jobs if job.error is not None]
        self._jobs.clear()
        if errors:
            raise errors[0]

    def _release(self) -> None:
        for record in self._records:
            self._disk.release(record)
        self._records.clear()

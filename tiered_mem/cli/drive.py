"""How fast the disk tier is in a directory."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..allocators import PageableMemory, Region, SlabPool, round_up
from ..sizes import format_bytes
from ..spill.checksums import Checksum, checksum_by_name
from ..spill.disk_tier import SMALLEST_RECORD, DiskTier
from ..spill.files import memory_at
from ..spill.filesystem import direct_io_alignment, filesystem_of
from ..spill.folder import owners
from ..spill.io_queue import Job
from ..spill.record_io import Piece
from .folders import ask

ROUNDS = 3

_RECORD_BYTES = 16 << 20
_MEMORY_BYTES = 256 << 20
_NOISE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Drive:
    """A measured drive. Speeds are in 1e9 bytes per second.

    filesystem: the kernel's name for it. direct_io: whether records go past the page cache. alignment: of direct
    I/O, in bytes; None where the kernel does not tell. checksum: the name of the records' checksum.
    """

    path: Path
    filesystem: str
    in_memory: bool
    network: bool
    free_bytes: int
    direct_io: bool
    alignment: int | None
    write: float
    read: float
    checksum: str
    checksum_speed: float


def measure_drive(path: Path, nbytes: int, advance: Callable[[int], None]) -> Drive:
    """Writes and reads `nbytes` several times, in a folder that is gone afterwards.

    advance: called with the bytes that were moved since the last call; about 2 * ROUNDS * nbytes in all.

    Raises SpillDirRefused, ValueError where the drive has no room for as much, and OSError.
    """
    ask(owners, path)  # says what is wrong with it
    filesystem = filesystem_of(path)
    found = os.statvfs(path)
    if found.f_blocks == 0:
        raise ValueError(
            f"{path} lies on {filesystem.name}, which has no room for files; give a directory on a local drive"
        )
    free = found.f_bavail * found.f_frsize
    record = min(_RECORD_BYTES, round_up(nbytes))
    count = -(-nbytes // record)
    capacity = count * (record + SMALLEST_RECORD)
    if capacity > free:
        raise ValueError(
            f"to write {format_bytes(nbytes)} takes {format_bytes(capacity)}, and {path} has {format_bytes(free)} "
            "left; lower --bytes, or make room"
        )
    with _memory(min(count, _MEMORY_BYTES // record), record) as regions:
        with closing(DiskTier(path, capacity=capacity)) as tier:
            direct = tier.stats().direct
            with tempfile.TemporaryFile(dir=path) as file:
                alignment = direct_io_alignment(f"/proc/self/fd/{file.fileno()}")
            rounds = [
                _round(tier, [regions[n % len(regions)] for n in range(count)], advance) for _ in range(ROUNDS)
            ]
        checksum = checksum_by_name(None)
        checksum_speed = _checksum_speed(checksum, regions)
    write, read = (statistics.median(speeds) for speeds in zip(*rounds, strict=True))
    return Drive(
        path=path,
        filesystem=filesystem.name,
        in_memory=filesystem.in_memory,
        network=filesystem.network,
        free_bytes=free,
        direct_io=direct,
        alignment=alignment or None,
        write=write,
        read=read,
        checksum=checksum.name,
        checksum_speed=checksum_speed,
    )


@contextmanager
def _memory(count: int, nbytes: int) -> Iterator[list[Region]]:
    """Regions of plain pages, full of bytes that no file system can compress."""
    noise = os.urandom(min(nbytes, _NOISE_BYTES))
    with SlabPool(PageableMemory(), count * nbytes) as pool:
        regions = [pool.allocate(nbytes) for _ in range(count)]
        for region in regions:
            for start in range(0, nbytes, len(noise)):
                size = min(len(noise), nbytes - start)
                memory_at(region.ptr + start, size)[:] = noise[:size]
        try:
            yield regions
        finally:
            for region in regions:
                pool.deallocate(region)


def _round(tier: DiskTier, regions: Sequence[Region], advance: Callable[[int], None]) -> tuple[float, float]:
    """The speeds of writing a record from each region and of reading it back. A region may come several times."""
    began = time.perf_counter()
    records = [
        tier.write([Piece("probe", region.ptr, region.nbytes, "uint8")], step=0, kind="probe") for region in regions
    ]
    _end((record.job for record in records), regions, advance)
    written = time.perf_counter()
    # What comes back is what is there already: it does not matter who comes first.
    jobs = [tier.read(record, [(0, region.ptr)]) for record, region in zip(records, regions, strict=True)]
    _end(jobs, regions, advance)
    read = time.perf_counter()
    for record in records:
        tier.release(record)
    nbytes = sum(region.nbytes for region in regions)
    return nbytes / (written - began) / 1e9, nbytes / (read - written) / 1e9


def _end(jobs: Iterable[Job], regions: Sequence[Region], advance: Callable[[int], None]) -> None:
    for job, region in zip(jobs, regions, strict=True):
        job.wait()
        if job.error is not None:
            raise job.error
        advance(region.nbytes)


def _checksum_speed(checksum: Checksum, regions: Sequence[Region]) -> float:
    began = time.perf_counter()
    for region in regions:
        checksum.of(memory_at(region.ptr, region.nbytes))
    return sum(region.nbytes for region in regions) / (time.perf_counter() - began) / 1e9

"""A drive that blocks spill to: that it takes and gives bytes, how fast, and that damage is found."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from ..errors import CorruptRecord
from ..sizes import format_bytes
from ..spill.disk_tier import DiskTier
from ..spill.filesystem import direct_io_alignment, filesystem_of, memory_at, pages
from ..spill.lower_tier import Piece
from ..spill.record import ALIGNMENT
from ..tiers.measure import measured_tier, room_for
from .bench import Bench
from .outcome import Check, Outcome, failed, passed

RECORDS = "records on the drive"
_RECORD, _RECORDS = 4 << 20, 8
_BYTES, _QUICK_BYTES = 256 << 20, 64 << 20


def drive() -> list[Check]:
    return [
        Check(RECORDS, _records),
        Check("damage is found", _damage, (RECORDS,)),
        Check("drive rates", _rates, (RECORDS,)),
    ]


def _records(bench: Bench) -> Outcome:
    """What is written is what is read, byte for byte, also in files that are used again."""
    with _tier(bench) as tier, pages(2 * _RECORD) as start:
        back = start + _RECORD
        for _ in range(_RECORDS):
            written = os.urandom(_RECORD)
            memory_at(start, _RECORD)[:] = written
            memory_at(back, _RECORD)[:] = bytes(_RECORD)
            record = tier.write([Piece("check", start, _RECORD, "uint8")], step=0, kind="check")
            record.job.wait()
            if record.job.error is not None:
                return failed(f"writing in {bench.folder} failed: {record.job.error}")
            reading = tier.read(record, [(0, back)])
            reading.wait()
            if reading.error is not None:
                return failed(f"reading in {bench.folder} failed: {reading.error}")
            if bytes(memory_at(back, _RECORD)) != written:
                return failed(f"a record in {bench.folder} came back with other bytes, and its checksum was right")
            tier.release(record)
    return passed(f"{_RECORDS} records of {format_bytes(_RECORD)} came back as they were written")


def _damage(bench: Bench) -> Outcome:
    """A byte of a record is changed behind the tier's back."""
    with _tier(bench) as tier, pages(_RECORD) as start:
        record = tier.write([Piece("check", start, _RECORD, "uint8")], step=0, kind="check")
        record.job.wait()
        (path,) = _files_of_this_process(bench.folder)
        with path.open("r+b") as file:
            file.seek(-ALIGNMENT, os.SEEK_END)
            file.write(b"\x01")
            os.fsync(file.fileno())
        reading = tier.read(record, [(0, start)])
        reading.wait()
        if not isinstance(reading.error, CorruptRecord):
            return failed(f"a changed byte was not found: reading ended with {reading.error!r}")
    return passed("a changed byte was found by its checksum, and nothing of the record was used")


def _rates(bench: Bench) -> Outcome:
    nbytes = _QUICK_BYTES if bench.quick else _BYTES
    with _tier(bench, room_for(nbytes)) as tier:
        direct = tier.stats().direct
        link = measured_tier(tier, nbytes)
    filesystem = filesystem_of(bench.folder)
    way = f"direct I/O{_multiples(bench.folder)}" if direct else "no direct I/O, through the page cache"
    memory = ", which is memory and no drive" if filesystem.in_memory else ""
    return passed(
        f"{filesystem.name}{memory}, {way}; {link.out / 1e9:.2f} GB/s to write, {link.back / 1e9:.2f} GB/s to read",
        write=(link.out / 1e9, "GB/s"),
        read=(link.back / 1e9, "GB/s"),
        latency=(1e6 * link.latency, "us"),
        direct=(float(direct), ""),
    )


@contextmanager
def _tier(bench: Bench, capacity: int = 64 << 20) -> Iterator[DiskTier]:
    with closing(DiskTier(bench.folder, capacity=capacity, files=bench.files)) as tier:
        yield tier


def _files_of_this_process(folder: Path) -> list[Path]:
    """Of spill folders only, which name their process."""
    return [path for path in folder.glob(f"tiered_mem-*/*-{os.getpid()}-*/*.safetensors") if path.is_file()]


def _multiples(folder: Path) -> str:
    alignment = direct_io_alignment(folder)
    return f" in multiples of {alignment} bytes" if alignment else ""

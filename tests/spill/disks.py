"""Disk tiers of tests, of which nothing may be left behind."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.spill.faulty_files import FaultyFiles
from tests.spill.memory import Memory, empty
from tiered_mem.spill.disk_tier import DiskRecord, DiskTier
from tiered_mem.spill.io_queue import Drive
from tiered_mem.spill.lower_tier import Job
from tiered_mem.spill.room import Room
from tiered_mem.spill.several_drives import SeveralDrives
from tiered_mem.spill.write_gate import WriteBudget

MIB = 1 << 20
BLOCK = 4096


@dataclass
class Clock:
    """Seconds that pass when a test says so."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Disk:
    """A tier in a folder of its own, and what is to be known of it."""

    tier: DiskTier
    files: FaultyFiles
    clock: Clock
    folder: Path
    capacity: int
    overfull: list[int] = field(default_factory=list)

    def write(self, *contents: bytes) -> tuple[DiskRecord, list[Memory]]:
        """Begin a record of so many pieces. The memory is to be kept until it is written."""
        memory = [Memory(content) for content in contents]
        pieces = [part.piece(f"block.{index}") for index, part in enumerate(memory)]
        return self.tier.write(pieces, step=3, kind="activation"), memory

    def put(self, *contents: bytes) -> DiskRecord:
        """A record that is written."""
        record, _memory = self.write(*contents)
        record.job.wait()
        assert record.job.error is None, record.job.error
        return record

    def refused(self, *contents: bytes) -> Exception:
        """What goes wrong in writing."""
        record, _memory = self.write(*contents)
        record.job.wait()
        assert record.job.error is not None
        return record.job.error

    def read(self, record: DiskRecord) -> tuple[Job, list[Memory]]:
        """Begin to read all pieces of a record."""
        memory = [empty(entry.nbytes) for entry in record.header.entries]
        return self.tier.read(record, [(index, part.ptr) for index, part in enumerate(memory)]), memory

    def get(self, record: DiskRecord) -> list[bytes]:
        """The pieces of a record. Raises what went wrong."""
        job, memory = self.read(record)
        job.wait()
        if job.error is not None:
            raise job.error
        return [part.content for part in memory]

    def damaged(self, record: DiskRecord) -> Exception:
        """What goes wrong in reading."""
        job, _memory = self.read(record)
        job.wait()
        assert job.error is not None
        return job.error

    def path(self, record: DiskRecord) -> Path:
        """The file that a record is in."""
        assert record.file is not None
        return next(self.folder.rglob(record.file.name))

    def paths(self) -> list[Path]:
        return sorted(self.folder.rglob("*.safetensors"))

    def real_bytes(self) -> int:
        """What the files in the folder take, by their lengths."""
        with self.files.still:
            return sum(path.lstat().st_size for path in self.paths())

    def watch(self) -> None:
        real = self.real_bytes()
        if real > self.capacity:
            self.overfull.append(real)


@contextlib.contextmanager
def disk_in(
    folder: Path, *, capacity: int = 16 * MIB, files: FaultyFiles | None = None, workers: int = 1, **options: Any
) -> Iterator[Disk]:
    """A tier that never takes more than its capacity, and of which nothing is left at the end."""
    files, clock = files or FaultyFiles(), Clock()
    fds = open_in(folder)
    options = {"clock": clock} | options
    tier = DiskTier(folder, capacity=capacity, files=files, workers=workers, **options)
    disk = Disk(tier, files, clock, folder, capacity)
    files.watch = disk.watch
    try:
        yield disk
    finally:
        tier.close()
    assert not disk.overfull, f"{disk.overfull} of {capacity}"
    assert list(folder.iterdir()) == []
    assert open_in(folder) == fds
    assert io_threads() == []


def drives_in(
    folder: Path,
    files: Sequence[FaultyFiles],
    *,
    capacity: int = 16 * MIB,
    limits: Sequence[int] | None = None,
    drives: Sequence[Drive] | None = None,
    first: int = 0,
    **options: Any,
) -> SeveralDrives:
    """A tier over a new folder for each of these, which share the capacity. The clock stands still unless given.

    limits: of each drive, in place of the capacity. drives: models of them.
    """
    room, budget = Room(capacity), WriteBudget(None)
    options = {"clock": Clock(), "workers": 1, "room": room, "write_budget": budget} | options
    tiers = []
    for number, each in enumerate(files):
        (path := folder / f"drive-{number}").mkdir()
        limit = capacity if limits is None else limits[number]
        model = None if drives is None else drives[number]
        tiers.append(DiskTier(path, capacity=limit, files=each, drive=model, **options))
    return SeveralDrives(tiers, capacity=capacity, first=first)


def open_in(folder: Path) -> list[str]:
    """The files that this process has open below a folder."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted(link for link in links if link.startswith(f"{folder}/"))


def io_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("tiered_mem-disk")]

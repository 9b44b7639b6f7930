"""Who writes and reads in benchmarks.spill: the disk tier and its peers."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from tiered_mem.allocators import Region
from tiered_mem.spill.chosen import tier_in
from tiered_mem.spill.lower_tier import Job, Piece, Record
from tiered_mem.tiers.host_tier import bytes_of

TIER, SAFETENSORS = "disk tier", "safetensors"
# Requests under way of each peer with libaio, and DeepSpeed's threads: as many as the disk tier's.
DEPTH, THREADS = 8, 2


class Spent(NamedTuple):
    """The seconds that something took, by the clock and of processor time."""

    wall: float
    cpu: float


class Contestant(Protocol):
    name: str

    def write(self) -> Spent: ...
    def read(self) -> Spent: ...


class Tier:
    """Records of the disk tier in a folder on each drive, from slab memory into slab memory."""

    def __init__(
        self, folders: Sequence[Path], source: Sequence[Region], slots: Sequence[Region], checksum: str | None
    ) -> None:
        self.name = TIER if len(folders) == 1 else f"{TIER}, {len(folders)} drives"
        self._source, self._slots = source, slots
        room = sum(region.nbytes for region in source)
        self._tier = tier_in(folders, capacity=room + room // 8 + (1 << 20), checksum=checksum)
        self._records: list[Record] = []

    def write(self) -> Spent:
        for record in self._records:
            self._tier.release(record)

        def work() -> None:
            self._records = [
                self._tier.write([Piece("block", region.ptr, region.nbytes, "uint8")], step=0, kind="benchmark")
                for region in self._source
            ]
            ended(record.job for record in self._records)

        return timed(work)

    def read(self) -> Spent:
        spent = timed(
            lambda: ended(
                [
                    self._tier.read(record, [(0, slot.ptr)])
                    for record, slot in zip(self._records, self._slots, strict=True)
                ]
            )
        )
        compare(self._source, [bytes_of(slot) for slot in self._slots])
        for slot in self._slots:
            bytes_of(slot).zero_()
        return spent

    def close(self) -> None:
        self._tier.close()


class Safetensors:
    """save_file and fsync; load_file and a clone of each tensor, from the drive and not from the page cache."""

    name = SAFETENSORS

    def __init__(self, folder: Path, source: Sequence[Region]) -> None:
        self._path = folder / "peer.safetensors"
        self._tensors = {f"block.{number}": bytes_of(region) for number, region in enumerate(source)}

    def write(self) -> Spent:
        def work() -> None:
            save_file(self._tensors, self._path)
            with opened(self._path) as fd:
                os.fsync(fd)

        return timed(work)

    def read(self) -> Spent:
        with opened(self._path) as fd:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return timed(lambda: {name: tensor.clone() for name, tensor in load_file(self._path).items()})


class Fio:
    """A job of fio's with direct I/O. It tells its time itself, without that of its start."""

    def __init__(self, folder: Path, nbytes: int, engine: str, block: int) -> None:
        self.name = f"fio {engine}, {block >> 20} MiB"
        self._command = [
            *("fio", "--name=peer", f"--filename={folder / 'peer.fio'}", "--direct=1", "--output-format=json"),
            *(f"--ioengine={engine}", f"--bs={block}", f"--size={nbytes // block * block}", "--overwrite=1"),
            *(("--iodepth=1",) if engine == "psync" else (f"--iodepth={DEPTH}",)),
        ]

    def write(self) -> Spent:
        return self._run("write")

    def read(self) -> Spent:
        return self._run("read")

    def _run(self, direction: str) -> Spent:
        done = subprocess.run([*self._command, f"--rw={direction}"], check=True, capture_output=True, text=True)
        (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
        moved = job[direction]
        # The time to the millisecond does for seconds only; the speed is counted in microseconds.
        wall = moved["io_bytes"] / moved["bw_bytes"]
        return Spent(wall, wall * (job["usr_cpu"] + job["sys_cpu"]) / 100)


class DeepSpeed:
    """DeepSpeed's asynchronous I/O, with a file for each tensor, and memory that it has pinned itself."""

    name = "DeepSpeed, 1 MiB"

    def __init__(self, folder: Path, source: Sequence[Region], module: Any) -> None:
        self._handle = module.aio_handle(1 << 20, DEPTH, False, True, THREADS)
        self._source = source
        example = torch.empty(0, dtype=torch.uint8)
        self._tensors = [self._handle.new_cpu_locked_tensor(region.nbytes, example) for region in source]
        self._paths = [str(folder / f"peer.{number}") for number in range(len(source))]

    def write(self) -> Spent:
        for tensor, region in zip(self._tensors, self._source, strict=True):
            tensor.copy_(bytes_of(region))
        return self._move(self._handle.async_pwrite)

    def read(self) -> Spent:
        for tensor in self._tensors:
            tensor.zero_()
        spent = self._move(self._handle.async_pread)
        compare(self._source, self._tensors)
        return spent

    def _move(self, begin: Callable[..., object]) -> Spent:
        def work() -> None:
            for tensor, path in zip(self._tensors, self._paths, strict=True):
                begin(tensor, path, 0)
            self._handle.wait()

        return timed(work)


def fio(folder: Path, nbytes: int, console: Console) -> list[Contestant]:
    if shutil.which("fio") is None:
        console.print("fio is left out: it is not installed (Debian: apt install fio)")
        return []
    return [Fio(folder, nbytes, engine, block << 20) for engine in ("psync", "libaio") for block in (1, 4)]


def deepspeed(folder: Path, source: Sequence[Region], console: Console) -> list[Contestant]:
    try:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        return [DeepSpeed(folder, source, AsyncIOBuilder().load(verbose=False))]
    except Exception as error:  # whatever its build raises
        console.print(f"DeepSpeed is left out: {error}")
        return []


def compare(source: Sequence[Region], tensors: Sequence[torch.Tensor]) -> None:
    for region, tensor in zip(source, tensors, strict=True):
        if not torch.equal(bytes_of(region), tensor):
            raise SystemExit("what was read is not what was written")


def ended(jobs: Iterable[Job]) -> None:
    for job in jobs:
        job.wait()
        if job.error is not None:
            raise job.error


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def timed(work: Callable[[], object]) -> Spent:
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    result = work()
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    del result  # giving memory back is not what is measured
    return Spent(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)

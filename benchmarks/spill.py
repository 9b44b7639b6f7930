"""How fast the disk tier writes and reads beside fio, safetensors and DeepSpeed: in one run, on one file system.

In each round every contestant writes the same number of bytes and reads them back, one after the other, in an
order that is another each time. The first round, in which files are laid out and memory is touched, does not count;
from then on fio, DeepSpeed and the disk tier write over files that are there. What is told are medians. The memory
of fio and DeepSpeed is of small pages: where the disk tier is faster, that may be due to the slab's huge ones.

    TORCH_DEVICE_BACKEND_AUTOLOAD=0 python -m benchmarks.spill --dir /mnt/nvme
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, Protocol

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from safetensors.torch import load_file, save_file

from tiered_mem.allocators import PageableMemory, Region, SlabPool
from tiered_mem.sizes import format_bytes, parse_bytes
from tiered_mem.spill.disk_tier import DiskTier
from tiered_mem.spill.filesystem import filesystem_of
from tiered_mem.spill.record_io import Piece
from tiered_mem.tiers import bytes_of

TIER, SAFETENSORS = "disk tier", "safetensors"
# What the disk tier has to reach, as a multiple of the best of fio and of safetensors.
DEMANDED = {("fio", "write"): 0.9, ("fio", "read"): 0.9, (SAFETENSORS, "write"): 3.0, (SAFETENSORS, "read"): 2.0}
DIRECTIONS = ("write", "read")
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


def main() -> None:
    options = parse()
    console = Console(highlight=False)
    count = max(1, options.bytes // options.record)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.dir, prefix="benchmark-")))
        source, slots = (stack.enter_context(memory(count, options.record)) for _ in range(2))
        fill(source, options.seed)
        contestants: list[Contestant] = [
            stack.enter_context(contextlib.closing(Tier(folder, source, slots, options.checksum))),
            Safetensors(folder, source),
            *fio(folder, count * options.record, console),
            *deepspeed(folder, source, console),
        ]
        spent = measure(contestants, options.rounds, Random(options.seed))
    nbytes = count * options.record
    console.print(
        f"{filesystem_of(options.dir).name}, {format_bytes(nbytes)} a round in {count} records, "
        f"{options.rounds} rounds, {os.cpu_count()} processors"
    )
    show(spent, nbytes, console)
    if options.json is not None:
        options.json.write_text(json.dumps(figures(spent, nbytes), indent=1) + "\n")


class Tier:
    """Records of the disk tier, from slab memory into slab memory."""

    name = TIER

    def __init__(
        self, folder: Path, source: Sequence[Region], slots: Sequence[Region], checksum: str | None
    ) -> None:
        self._source, self._slots = source, slots
        room = sum(region.nbytes for region in source)
        self._tier = DiskTier(folder, capacity=room + room // 8 + (1 << 20), checksum=checksum)
        self._records: list[Any] = []

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


@contextlib.contextmanager
def memory(count: int, nbytes: int) -> Iterator[list[Region]]:
    """Regions of a slab of ordinary pages, which are touched."""
    source = PageableMemory()
    with SlabPool(source, count * nbytes) as pool:
        pool.preallocate(count * nbytes)
        regions = [pool.allocate(nbytes) for _ in range(count)]
        for region in regions:
            bytes_of(region).zero_()
        try:
            yield regions
        finally:
            for region in regions:
                pool.deallocate(region)


def fill(regions: Sequence[Region], seed: int) -> None:
    """With what no file system can compress."""
    generator = torch.Generator().manual_seed(seed)
    for region in regions:
        bytes_of(region).random_(generator=generator)


def compare(source: Sequence[Region], tensors: Sequence[torch.Tensor]) -> None:
    for region, tensor in zip(source, tensors, strict=True):
        if not torch.equal(bytes_of(region), tensor):
            raise SystemExit("what was read is not what was written")


def ended(jobs: Any) -> None:
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


def measure(contestants: Sequence[Contestant], rounds: int, random: Random) -> dict[tuple[str, str], list[Spent]]:
    """What each round took, by the contestant's name and the direction."""
    spent: dict[tuple[str, str], list[Spent]] = {
        (one.name, direction): [] for one, direction in itertools.product(contestants, DIRECTIONS)
    }
    for number in track(range(rounds + 1), description="rounds"):
        for one in random.sample(contestants, len(contestants)):
            for direction, work in (("write", one.write), ("read", one.read)):
                took = work()
                if number:
                    spent[one.name, direction].append(took)
    return spent


def speed(spent: Sequence[Spent], nbytes: int) -> float:
    """GB/s at the median round."""
    return nbytes / statistics.median(each.wall for each in spent) / 1e9


def cpu(spent: Sequence[Spent], nbytes: int) -> float:
    """Seconds for a GB at the median round."""
    return statistics.median(each.cpu for each in spent) / nbytes * 1e9


def ratios(spent: dict[tuple[str, str], list[Spent]], nbytes: int) -> dict[tuple[str, str], float]:
    """How many times as fast as the best of each kind of peer the disk tier is, by the kind and the direction."""
    found = {}
    for kind, direction in DEMANDED:
        peers = [
            speed(each, nbytes) for (name, way), each in spent.items() if way == direction and name.startswith(kind)
        ]
        if peers:
            found[kind, direction] = speed(spent[TIER, direction], nbytes) / max(peers)
    return found


def show(spent: dict[tuple[str, str], list[Spent]], nbytes: int, console: Console) -> None:
    table = Table("median (least to most)", "write GB/s", "CPU s/GB", "read GB/s", "CPU s/GB")
    for name in dict.fromkeys(name for name, _ in spent):
        row = [name]
        for direction in DIRECTIONS:
            each = spent[name, direction]
            rates = [nbytes / took.wall / 1e9 for took in each]
            row += [f"{speed(each, nbytes):.2f} ({min(rates):.1f}-{max(rates):.1f})", f"{cpu(each, nbytes):.2f}"]
        table.add_row(*row)
    console.print(table)
    table = Table("the disk tier's speed over", "direction", "ratio", "demanded")
    for (kind, direction), ratio in ratios(spent, nbytes).items():
        table.add_row(
            "the best of fio" if kind == "fio" else kind,
            direction,
            f"{ratio:.2f}",
            f"{DEMANDED[kind, direction]:.1f}",
        )
    console.print(table)


def figures(spent: dict[tuple[str, str], list[Spent]], nbytes: int) -> dict[str, float]:
    found: dict[str, float] = {"bytes": nbytes}
    for (name, direction), each in spent.items():
        found[f"{name}, {direction} (GB/s)"] = speed(each, nbytes)
        found[f"{name}, {direction}, CPU (s/GB)"] = cpu(each, nbytes)
    for (kind, direction), ratio in ratios(spent, nbytes).items():
        found[f"{TIER}, {direction}, over {kind}"] = ratio
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="on the drive to measure")
    parser.add_argument("--bytes", type=parse_bytes, default=1 << 30, help="of each round, such as 1GiB")
    parser.add_argument("--record", type=parse_bytes, default=16 << 20, help="of each record, such as 16MiB")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--checksum", help="of the disk tier: xxh3_64, crc32 or none")
    parser.add_argument("--seed", type=int, default=0, help="of the data and of the order")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()

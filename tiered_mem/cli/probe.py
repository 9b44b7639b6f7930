"""Measure the link to the device, and a drive to spill to.

Copies between the device, where there is one, and pinned host memory. Then writes and reads records of the disk
tier in DIR, several times. Nothing stays behind. As every process that starts to spill in DIR, it removes what this
user's dead processes have left there. The exit status is 1 if a backend that `import torch` loads does not load.
"""

from __future__ import annotations

import argparse
import importlib
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from ..allocators.base import round_up
from ..sizes import format_bytes
from ..spill.disk_tier import SMALLEST_RECORD, DiskTier
from ..spill.filesystem import direct_io_alignment, filesystem_of, memory_at, pages
from ..spill.folder import owners
from ..spill.lower_tier import Job, Piece
from ..spill.record_io import checksum_by_name
from .inspect import ask
from .output import byte_bar, console, plain, size, table, write_json

if TYPE_CHECKING:
    from ..tiers.measured_link import MeasuredLink

_ROUNDS = 3
_RECORD_BYTES = 16 << 20
_MEMORY_BYTES = 256 << 20
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_WITHOUT = "So `import torch` fails here, unless TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set"
_COLUMNS = {"": False, "what was found": False}


@dataclass(frozen=True, slots=True)
class MeasuredDrive:
    """A measured drive. Speeds are in 1e9 bytes per second.

    filesystem: the kernel's name for it. direct_io: whether records go past the page cache. alignment: of direct
    I/O, in bytes; None where the kernel does not tell. checksum: the name of the records' checksum.
    """

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "dir", metavar="DIR", nargs="?", type=Path, help="on the drive; by default the temporary files'"
    )
    parser.add_argument("--bytes", type=size, default=256 << 20, help="how much is written, such as 4GiB (256MiB)")
    parser.add_argument(
        "--device", help='such as "npu:1"; "cpu" leaves the link out (the accelerator that torch has)'
    )


def run(options: argparse.Namespace) -> int:
    path = Path(tempfile.gettempdir()) if options.dir is None else options.dir
    link, why, broken = _link(options.device)
    with byte_bar() as bar:
        task = bar.add_task(f"writing and reading in {path}", total=2 * _ROUNDS * options.bytes)
        drive = _drive(path, options.bytes, lambda nbytes: bar.advance(task, nbytes))
    if options.json:
        about_link = {"problem": why} if link is None else asdict(link)
        about_drive = {"path": str(path), **asdict(drive), "bytes": options.bytes}
        write_json({"link": about_link, "broken_backends": broken, "drive": about_drive})
    else:
        screen = console()
        for name, problem in broken.items():
            screen.print(plain(f"torch's backend {name} does not load: {problem}. {_WITHOUT}"), soft_wrap=True)
        _show(link, why, drive, f"{path}, {format_bytes(options.bytes)} at a time", screen)
    return 1 if broken else 0


def _link(asked: str | None) -> tuple[MeasuredLink | None, str, dict[str, str]]:
    """The link, or None and the reason; and the errors of torch's backends that do not load, by name."""
    if asked == "cpu":
        return None, "it was not asked for", {}
    broken = _import_torch()
    from ..tiers.measured_link import link_to  # it needs torch, which nothing else of the command line does

    return *link_to(asked), broken


def _import_torch() -> dict[str, str]:
    """Imports torch, and the installed backends after it. Returns the error of each that does not load, by name.

    `import torch` loads them too, fails as a whole where one of them fails, and cannot be tried again in the same
    process. No backend is loaded where torch is imported already, or where the environment forbids it. Raises
    ImportError where there is no torch.
    """
    if "torch" in sys.modules:
        return {}
    before = os.environ.get(_AUTOLOAD)
    os.environ[_AUTOLOAD] = "0"
    try:
        importlib.import_module("torch")
    finally:
        os.environ.pop(_AUTOLOAD)
        os.environ.update({} if before is None else {_AUTOLOAD: before})
    broken = {}
    if before in (None, "1"):
        for backend in entry_points(group="torch.backends"):
            try:
                backend.load()()
            except Exception as error:  # whatever a package that is not ours runs into, as torch has it
                broken[backend.name] = " ".join(str(error).split())
    return broken


def _drive(path: Path, nbytes: int, advance: Callable[[int], None]) -> MeasuredDrive:
    """Writes and reads `nbytes` several times, in a folder that is gone afterwards.

    advance: called with the bytes that were moved since the last call; about 2 * _ROUNDS * nbytes in all.

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
    buffers = min(count, _MEMORY_BYTES // record)
    with pages(buffers * record) as start:
        noise = os.urandom(record)  # which no file system can compress
        for n in range(buffers):
            memory_at(start + n * record, record)[:] = noise
        with closing(DiskTier(path, capacity=capacity)) as tier:
            direct = tier.stats().direct
            with tempfile.TemporaryFile(dir=path) as file:
                alignment = direct_io_alignment(f"/proc/self/fd/{file.fileno()}")
            # A piece of memory may go into several records.
            pieces = [Piece("probe", start + n % buffers * record, record, "uint8") for n in range(count)]
            rounds = [_round(tier, pieces, advance) for _ in range(_ROUNDS)]
        checksum = checksum_by_name(None)
        began = time.perf_counter()
        checksum.of(memory_at(start, buffers * record))
        checksum_speed = buffers * record / (time.perf_counter() - began) / 1e9
    write, read = (statistics.median(speeds) for speeds in zip(*rounds, strict=True))
    return MeasuredDrive(
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


def _round(tier: DiskTier, pieces: Sequence[Piece], advance: Callable[[int], None]) -> tuple[float, float]:
    """The speeds of writing a record of each piece and of reading it back."""
    began = time.perf_counter()
    records = [tier.write([piece], step=0, kind="probe") for piece in pieces]
    _wait((record.job for record in records), pieces, advance)
    written = time.perf_counter()
    # What comes back is what is there already: it does not matter who comes first.
    jobs = [tier.read(record, [(0, piece.ptr)]) for record, piece in zip(records, pieces, strict=True)]
    _wait(jobs, pieces, advance)
    read = time.perf_counter()
    for record in records:
        tier.release(record)
    nbytes = sum(piece.nbytes for piece in pieces)
    return nbytes / (written - began) / 1e9, nbytes / (read - written) / 1e9


def _wait(jobs: Iterable[Job], pieces: Sequence[Piece], advance: Callable[[int], None]) -> None:
    for job, piece in zip(jobs, pieces, strict=True):
        job.wait()
        if job.error is not None:
            raise job.error
        advance(piece.nbytes)


def _show(link: MeasuredLink | None, why: str, drive: MeasuredDrive, title: str, screen: Console) -> None:
    if link is None:
        screen.print(f"The link to a device was not measured: {why}.")
    else:
        near = "" if link.numa_node is None else f", at NUMA node {link.numa_node}"
        pinned = "" if link.pinned else ", which torch does not take for pinned: the host waits at each copy"
        rows = [
            ("host memory", f'pin="{link.pin}"{pinned}'),
            (
                "its address",
                f"a multiple of {format_bytes(link.alignment)}; pages of {format_bytes(mmap.PAGESIZE)}",
            ),
            ("to the device", _speed(link.to_device)),
            ("from the device", _speed(link.from_device)),
            ("both at once", f"{_speed(link.both)} together"),
        ]
        screen.print(table(f"{link.device}{near}", _COLUMNS, rows))
    kind = "in memory" if drive.in_memory else "on a network, or in user space" if drive.network else "local"
    aligned = "" if drive.alignment is None else f", in multiples of {drive.alignment} bytes"
    rows = [
        ("file system", f"{drive.filesystem}, {kind}"),
        ("left", format_bytes(drive.free_bytes)),
        ("direct I/O", f"yes{aligned}" if drive.direct_io else "no: through the page cache"),
        ("write", _speed(drive.write)),
        ("read", _speed(drive.read)),
        ("checksum", f"{drive.checksum}, {_speed(drive.checksum_speed)}"),
    ]
    screen.print(table(title, _COLUMNS, rows))


def _speed(speed: float) -> str:
    return f"{speed:.2f} GB/s" if speed >= 0.1 else f"{1e3 * speed:.3g} MB/s"

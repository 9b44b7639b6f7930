"""Measure the link to the device, and a drive to spill to.

Copies between the device, where there is one, and pinned host memory. Then writes and reads records of the disk
tier in DIR, several times. Nothing stays behind. As every process that starts to spill in DIR, it removes what this
user's dead processes have left there. The exit status is 1 if a backend that `import torch` loads does not load.
"""

from __future__ import annotations

import argparse
import dataclasses
import mmap
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from ..sizes import format_bytes, parse_bytes
from .backends import import_torch
from .drive import ROUNDS, Drive, measure_drive
from .output import byte_bar, console, plain, table, write_json

if TYPE_CHECKING:
    from .link import Link

_WITHOUT = "So `import torch` fails here, unless TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set"
_COLUMNS = {"": False, "what was found": False}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "dir", metavar="DIR", nargs="?", type=Path, help="on the drive; by default the temporary files'"
    )
    parser.add_argument("--bytes", type=_size, default=256 << 20, help="how much is written, such as 4GiB (256MiB)")
    parser.add_argument(
        "--device", help='such as "npu:1"; "cpu" leaves the link out (the accelerator that torch has)'
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")


def run(options: argparse.Namespace) -> int:
    path = Path(tempfile.gettempdir()) if options.dir is None else options.dir
    link, why, broken = _link(options.device)
    with byte_bar() as bar:
        task = bar.add_task(f"writing and reading in {path}", total=2 * ROUNDS * options.bytes)
        drive = measure_drive(path, options.bytes, lambda nbytes: bar.advance(task, nbytes))
    if options.json:
        found = dataclasses.asdict(drive) | {"path": str(path), "bytes": options.bytes}
        write_json(
            {
                "link": {"problem": why} if link is None else dataclasses.asdict(link),
                "broken_backends": broken,
                "drive": found,
            }
        )
    else:
        screen = console()
        for name, problem in broken.items():
            screen.print(plain(f"torch's backend {name} does not load: {problem}. {_WITHOUT}"), soft_wrap=True)
        _show(link, why, drive, options.bytes, screen)
    return 1 if broken else 0


def _link(asked: str | None) -> tuple[Link | None, str, dict[str, str]]:
    """The link, or None and the reason; and the errors of torch's backends that do not load, by name."""
    if asked == "cpu":
        return None, "it was not asked for", {}
    broken = import_torch()
    from .link import link_to  # it needs torch, which nothing else of the command line does

    return *link_to(asked), broken


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _show(link: Link | None, why: str, drive: Drive, nbytes: int, screen: Console) -> None:
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
    screen.print(table(f"{drive.path}, {format_bytes(nbytes)} at a time", _COLUMNS, rows))


def _speed(speed: float) -> str:
    return f"{speed:.2f} GB/s" if speed >= 0.1 else f"{1e3 * speed:.3g} MB/s"

"""Measure the link to the device, and a drive to spill to, or several.

How much host memory there is to take. Copies between the device, where there is one, and pinned host memory. Then
writes and reads records of the disk tier in DIR, several times. Of several directories all are measured together,
as a manager would use them, and then each by itself. Nothing stays behind. As every process that starts
to spill in DIR, it removes what this user's dead processes have left there. The exit status is 1 if a backend that
`import torch` loads does not load, or if the link to a device that was named could not be measured.
"""

from __future__ import annotations

import argparse
import importlib
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DeviceUnavailable
from ..ground.interrupts import Interrupts
from ..policies import Link
from ..sizes import format_bytes
from ..spill.chosen import tier_in
from ..spill.filesystem import FileSystem, direct_io_alignment, filesystem_of, memory_at, pages
from ..spill.folder import owners
from ..spill.record_io import checksum_by_name
from ..tiers.host_budget import host_budget, host_limit, local_processes
from ..tiers.measure import measured_link, measured_tier, room_for
from .inspect import ask
from .output import byte_bar, console, plain, size, table, with_units, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from ..device.device import Device

# What --json prints, speeds in 1e9 bytes per second.
Found = dict[str, Any]

_ROUNDS = 3
_LINK_BYTES = 128 << 20
_CHECKSUM_BYTES = 64 << 20
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_WITHOUT = "So `import torch` fails here, unless TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set"
_NOT_ASKED = "it was not asked for"
_UNITS = {
    **dict.fromkeys(("to_device", "from_device", "both", "write", "read", "checksum_speed"), "gb_per_s"),
    "latency": "seconds",
    "alignment": "bytes",
}
_COLUMNS = {"": False, "what was found": False}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "dirs", metavar="DIR", nargs="*", type=Path, help="on each drive; by default the temporary files'"
    )
    parser.add_argument("--bytes", type=size, default=256 << 20, help="how much each gets, such as 4GiB (256MiB)")
    parser.add_argument(
        "--device", help='such as "npu:1"; "cpu" leaves the link out (the accelerator that torch has)'
    )


def run(options: argparse.Namespace) -> int:
    paths: list[Path] = options.dirs or [Path(tempfile.gettempdir())]
    host = _host()
    link, why, broken = _link(options.device)
    with byte_bar() as bar:
        # Once each by itself, and as often all together.
        total = (1 + 4 * _ROUNDS) * options.bytes * (1 if len(paths) == 1 else 2 * len(paths))
        task = bar.add_task(f"writing and reading in {', '.join(map(str, paths))}", total=total)
        together, drives = _drives(paths, options.bytes, lambda nbytes: bar.advance(task, nbytes))
    if options.json:
        told = [
            with_units({"path": str(path), **drive, "bytes": options.bytes}, _UNITS)
            for path, drive in zip(paths, drives, strict=True)
        ]
        about_link = with_units(link, _UNITS) if link else {"problem": why}
        found = {"host": host, "link": about_link, "broken_backends": broken, "drive": told[0], "drives": told}
        write_json(found | {"together": None if together is None else with_units(together, _UNITS)})
    else:
        screen = console()
        for name, problem in broken.items():
            screen.print(plain(f"torch's backend {name} does not load: {problem}. {_WITHOUT}"), soft_wrap=True)
        _show_host(host, screen)
        _show_link(link, why, screen)
        for path, drive in zip(paths, drives, strict=True):
            _show_drive(drive, f"{path}, {format_bytes(options.bytes)} at a time", screen)
        if together is not None:
            _show_together(paths, drives, together, screen)
    return 1 if broken or (link is None and options.device not in (None, "cpu")) else 0


def _host() -> Found:
    """What host_bytes="auto" goes by. Raises ValueError where a variable of the environment is none that can be."""
    limit, processes = host_limit(), local_processes()
    return {
        "limit_bytes": limit.nbytes,
        "limited_by": limit.source,
        "processes": processes,
        "auto_bytes": host_budget("auto", limits=[limit], processes=processes),
    }


def _show_host(host: Found, screen: Console) -> None:
    count = host["processes"]
    whose = "1 process" if count == 1 else f"{count} processes together (LOCAL_WORLD_SIZE)"
    rows = [
        ("to use", f"{format_bytes(host['limit_bytes'])} for {whose}: {host['limited_by']}"),
        ('host_bytes="auto"', format_bytes(host["auto_bytes"])),
    ]
    screen.print(table("host memory", _COLUMNS, rows))


def _link(asked: str | None) -> tuple[Found | None, str, dict[str, str]]:
    """The link, or None and the reason; and the errors of torch's backends that do not load, by name.

    Raises ValueError for an unknown kind, DeviceUnavailable where `asked` is not on this machine, and PinningFailed
    where there is no host memory at all.
    """
    if asked == "cpu":
        return None, _NOT_ASKED, {}
    broken = _import_torch()
    import torch  # which nothing else of the command line needs

    from ..device.device import Device

    if asked is None and not torch.accelerator.is_available():
        return None, "torch finds no accelerator here", broken
    try:
        device = Device(asked)
    except (DeviceUnavailable, ValueError) as error:
        if asked is not None:
            raise
        return None, str(error), broken
    if device.kind == "cpu":
        return None, _NOT_ASKED, broken
    try:
        return _of_device(device), "", broken
    except torch.OutOfMemoryError as error:
        return None, f"the device has no {_LINK_BYTES >> 20} MiB left: {error}".splitlines()[0], broken


def _of_device(device: Device) -> Found:
    """pin: the source of the host memory. pinned: whether torch takes that for pinned."""
    import torch

    from ..tiers.host_tier import is_pinned
    from ..tiers.pinning import numa_node, pinned_slab

    with pinned_slab(device, _LINK_BYTES) as (pin, on_host):
        link = measured_link(device, on_host)
        address = on_host.data_ptr()
        return {
            "device": str(torch.get_device_module(device.kind).get_device_name(device.torch_device)),
            "numa_node": numa_node(device),
            "pin": pin,
            "pinned": is_pinned(on_host),
            "alignment": min(address & -address, 1 << 30),
            "to_device": link.back / 1e9,
            "from_device": link.out / 1e9,
            "both": _together(link),
        }


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


def _drives(paths: Sequence[Path], nbytes: int, advance: Callable[[int], None]) -> tuple[Found | None, list[Found]]:
    """What all drives do together, if there are several, and what each does by itself. Arguments as of `_drive`."""
    for path in paths:
        _check(path, nbytes)
    together = None
    if len(paths) > 1:
        link, _ = _measured(paths, len(paths) * nbytes, advance)
        together = _rates(link)
    return together, [_drive(path, nbytes, advance) for path in paths]


def _drive(path: Path, nbytes: int, advance: Callable[[int], None]) -> Found:
    """Writes and reads `nbytes` several times, in a folder that is gone afterwards.

    advance: called with the bytes that were moved since the last call.

    Raises SpillDirRefused, ValueError where the drive has no room for as much, and OSError.
    """
    filesystem, free = _check(path, nbytes)
    link, direct = _measured([path], nbytes, advance)
    with tempfile.TemporaryFile(dir=path) as file:
        alignment = direct_io_alignment(f"/proc/self/fd/{file.fileno()}")
    checksum = checksum_by_name(None)
    with pages(_CHECKSUM_BYTES) as start:
        memory = memory_at(start, _CHECKSUM_BYTES)
        memory[:] = bytes(_CHECKSUM_BYTES)  # there is no such memory before it is written to
        began = time.perf_counter()
        checksum.of(memory)
        seconds = time.perf_counter() - began
    return {
        "filesystem": filesystem.name,
        "in_memory": filesystem.in_memory,
        "network": filesystem.network,
        "free_bytes": free,
        "direct_io": direct,
        "alignment": alignment or None,
        **_rates(link),
        "checksum": checksum.name,
        "checksum_speed": _CHECKSUM_BYTES / seconds / 1e9,
    }


def _check(path: Path, nbytes: int) -> tuple[FileSystem, int]:
    """The file system of a directory, and the bytes that it has left. Raises as `_drive` does."""
    ask(owners, path)  # says what is wrong with it
    filesystem = filesystem_of(path)
    found = os.statvfs(path)
    if found.f_blocks == 0:
        raise ValueError(
            f"{path} lies on {filesystem.name}, which has no room for files; give a directory on a local drive"
        )
    free = found.f_bavail * found.f_frsize
    capacity = room_for(nbytes)
    if capacity > free:
        raise ValueError(
            f"to write {format_bytes(nbytes)} takes {format_bytes(capacity)}, and {path} has {format_bytes(free)} "
            "left; lower --bytes, or make room"
        )
    return filesystem, free


def _measured(paths: Sequence[Path], nbytes: int, advance: Callable[[int], None]) -> tuple[Link, bool]:
    """The rates of the drives together, and whether all take direct I/O."""
    with closing(Interrupts()) as interrupts, closing(tier_in(paths, capacity=room_for(nbytes))) as tier:
        interrupts.watch()
        direct = tier.stats().direct
        return measured_tier(tier, nbytes, rounds=_ROUNDS, moved=advance), direct


def _rates(link: Link) -> Found:
    return {"write": link.out / 1e9, "read": link.back / 1e9, "both": _together(link), "latency": link.latency}


def _together(link: Link) -> float:
    """Of both directions at once, in 1e9 bytes per second."""
    return link.both * (link.out + link.back) / 1e9


def _show_link(link: Found | None, why: str, screen: Console) -> None:
    if link is None:
        screen.print(f"The link to a device was not measured: {why}.")
    else:
        near = "" if link["numa_node"] is None else f", at NUMA node {link['numa_node']}"
        pinned = "" if link["pinned"] else ", which torch does not take for pinned: the host waits at each copy"
        alignment = format_bytes(link["alignment"])
        rows = [
            ("host memory", f'pin="{link["pin"]}"{pinned}'),
            ("its address", f"a multiple of {alignment}; pages of {format_bytes(mmap.PAGESIZE)}"),
            ("to the device", _speed(link["to_device"])),
            ("from the device", _speed(link["from_device"])),
            ("both at once", f"{_speed(link['both'])} together"),
        ]
        screen.print(table(f"{link['device']}{near}", _COLUMNS, rows))


def _show_drive(drive: Found, title: str, screen: Console) -> None:
    kind = "in memory" if drive["in_memory"] else "on a network, or in user space" if drive["network"] else "local"
    aligned = "" if drive["alignment"] is None else f", in multiples of {drive['alignment']} bytes"
    rows = [
        ("file system", f"{drive['filesystem']}, {kind}"),
        ("left", format_bytes(drive["free_bytes"])),
        ("direct I/O", f"yes{aligned}" if drive["direct_io"] else "no: through the page cache"),
        ("write", _speed(drive["write"])),
        ("read", _speed(drive["read"])),
        ("both at once", f"{_speed(drive['both'])} together"),
        ("checksum", f"{drive['checksum']}, {_speed(drive['checksum_speed'])}"),
    ]
    screen.print(table(title, _COLUMNS, rows))


def _show_together(paths: Sequence[Path], drives: Sequence[Found], together: Found, screen: Console) -> None:
    rows = [
        (name, *(_speed(found[way]) for way in ("write", "read", "both")))
        for name, found in [*zip(map(str, paths), drives, strict=True), ("together", together)]
    ]
    columns = {"": False, "write": True, "read": True, "both at once": True}
    screen.print(table(f"{len(drives)} drives", columns, rows))


def _speed(speed: float) -> str:
    return f"{speed:.2f} GB/s" if speed >= 0.1 else f"{1e3 * speed:.3g} MB/s"

"""The tier below the host that a manager's arguments describe."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import entry_points

from ..ground.arguments import with_methods
from ..sizes import format_bytes, parse_bytes
from .disk_tier import SMALLEST_RECORD, DiskTier
from .filesystem import Files
from .home import opened_spill_dir
from .io_queue import Drive
from .lower_tier import METHODS, LowerTier
from .room import Room, SharedDrives
from .several_drives import SeveralDrives
from .write_gate import WriteBudget

# One directory, or one for each drive.
SpillDir = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_log = logging.getLogger("tiered_mem.spill")


def chosen_tier(
    spill_dir: SpillDir | None,
    spill_bytes: int | str | None,
    spill_write_budget: int | str | None,
    spill_checksum: str | None,
    disk: LowerTier | None,
    shared: SharedDrives | None = None,
) -> LowerTier | None:
    """The tier below the host, if there is one. Arguments and errors are those of TieringManager.

    shared: with the ranks of the machine.
    """
    described = (spill_dir, spill_bytes, spill_write_budget, spill_checksum) != (None, None, None, None)
    described = described or (shared is not None and (shared.spill, shared.writes) != (None, None))
    if disk is not None:
        if described:
            raise ValueError(
                "disk comes in place of the arguments that begin with spill or node_spill: give either it or these"
            )
        with_methods("disk", disk, METHODS)
        return disk
    if spill_dir is None:
        if described:
            raise ValueError(
                "what begins with spill or node_spill describes a disk tier, which needs a spill_dir as well"
            )
        return None
    return tier_in(
        spill_dir,
        capacity=None if spill_bytes is None else parse_bytes(spill_bytes, "spill_bytes"),
        write_budget=None if spill_write_budget is None else parse_bytes(spill_write_budget, "spill_write_budget"),
        checksum=spill_checksum,
        shared=shared,
    )


def tier_in(
    spill_dir: SpillDir,
    *,
    capacity: int | None = None,
    write_budget: int | None = None,
    checksum: str | None = None,
    shared: SharedDrives | None = None,
) -> DiskTier | SeveralDrives:
    """A tier in one directory, or over several, on the drives that packages offer or else on real ones.

    capacity: the bytes that all files may take, on whichever drive; None is what other processes have a part of, or
    else half of what is free on each. Of a file system with several of the directories each has its part.

    Raises what `DiskTier` raises, TypeError, and ValueError for no directory and for one that is named twice.
    """
    paths = spill_dirs(spill_dir)
    spill, writes = (None, None) if shared is None else (shared.spill, shared.writes)
    budget = WriteBudget(write_budget, writes)
    if len(paths) == 1 and spill is None:
        drive = offered_drive()
        return DiskTier(paths[0], capacity=capacity, write_budget=budget, checksum=checksum, drive=drive)
    drives = [offered_drive(number) for number in range(len(paths))]
    # What other processes have may come to be this one's.
    free = [nbytes + (0 if spill is None else spill.used()) for nbytes in _free_bytes(paths, drives)]
    if spill is not None:
        capacity = spill.limit if capacity is None else min(capacity, spill.limit)
    if capacity is None:
        limits = [nbytes // 2 for nbytes in free]
        capacity = sum(limits)
    else:
        limits = [min(capacity, nbytes) for nbytes in free]
    if not SMALLEST_RECORD <= capacity <= sum(free):
        raise ValueError(
            f"capacity is {format_bytes(capacity)}, and {', '.join(os.fspath(path) for path in paths)} have "
            f"{format_bytes(sum(free))} left; the smallest record takes {format_bytes(SMALLEST_RECORD)}; "
            f"change {'spill_bytes' if spill is None else 'node_spill_bytes'}, or make room"
        )
    room = Room(capacity, spill)
    with contextlib.ExitStack() as undo:
        tiers = []
        for path, limit, drive in zip(paths, limits, drives, strict=True):
            tier = DiskTier(path, capacity=limit, write_budget=budget, room=room, checksum=checksum, drive=drive)
            undo.callback(tier.close)
            tiers.append(tier)
        undo.pop_all()
    if len(tiers) == 1:
        return tiers[0]
    # Where time is modelled, so is what happens, and a process's number would make each run another.
    modelled = any(drive is not None for drive in drives)
    return SeveralDrives(tiers, capacity=capacity, first=_first(0 if modelled else os.getpid()) % len(tiers))


def spill_dirs(spill_dir: SpillDir) -> list[str | os.PathLike[str]]:
    """The directories, one or several. Raises TypeError, and ValueError where there is none."""
    if isinstance(spill_dir, str | os.PathLike):
        return [spill_dir]
    if not isinstance(spill_dir, Sequence) or not all(isinstance(path, str | os.PathLike) for path in spill_dir):
        raise TypeError(f"spill_dir must be a directory's path, or a list of paths, not {spill_dir!r}")
    if not spill_dir:
        raise ValueError("spill_dir is an empty list; name a directory on each drive, or leave it out")
    return list(spill_dir)


def offered_drive(number: int = 0) -> Drive | None:
    """The first drive that an installed package offers to this process, by an entry point "tiered_mem.drives".

    That is a function of the number of the directory, from 0 on; it returns None where there is nothing to be
    modelled. One without arguments models a single drive, on which all directories lie.
    """
    offers = (entry.load() for entry in entry_points(group="tiered_mem.drives"))
    drives = (offer(number) if inspect.signature(offer).parameters else offer() for offer in offers)
    return next((drive for drive in drives if drive is not None), None)


def _free_bytes(paths: Sequence[str | os.PathLike[str]], drives: Sequence[Drive | None]) -> list[int]:
    """What each directory's tier may take of what is free: its part, where others lie on the same file system.

    Raises SpillDirRefused, and ValueError where one is named twice.
    """
    places: dict[tuple[int, int], str] = {}  # by the device and the inode
    free = []
    for path, drive in zip(paths, drives, strict=True):
        fd = opened_spill_dir(path)
        try:
            found = os.fstat(fd)
            free.append((Files() if drive is None else drive.files(Files())).free_bytes(fd))
        finally:
            os.close(fd)
        place, name = (found.st_dev, found.st_ino), os.fspath(path)
        if place in places:
            raise ValueError(f"spill_dir: {places[place]} and {name} are one directory; name one on each drive")
        twin = next((other for (device, _), other in places.items() if device == found.st_dev), None)
        if twin is not None:
            _log.warning("%s and %s lie on one drive, and are no faster than one of them", twin, name)
        places[place] = name
    alike = Counter(device for device, _ in places)
    return [nbytes // alike[device] for nbytes, (device, _) in zip(free, places, strict=True)]


def _first(otherwise: int) -> int:
    """What says with which drive to begin: the number of the rank on this machine, where there are ranks."""
    rank = os.environ.get("LOCAL_RANK", "")
    return int(rank) if rank.isdecimal() else otherwise

"""The host memory that this process may use: the container's limit where there is one, else the machine's RAM."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

# cgroup v1 writes "no limit" as a number: 2**63 less a page, which has up to 64 KiB.
_UNLIMITED = 1 << 62
_CAP_IPC_LOCK = 14


@dataclass(frozen=True, slots=True)
class HostLimit:
    """A limit of `nbytes`, for all processes of this machine or container together, or for each by itself."""

    nbytes: int
    source: str
    per_process: bool = False


def host_limit(cgroup_root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc/self/cgroup")) -> HostLimit:
    """The smallest of the machine's RAM and the memory limits of this process's cgroup and its parents."""
    limits = [HostLimit(psutil.virtual_memory().total, "the machine's RAM"), *cgroup_limits(cgroup_root, proc)]
    return min(limits, key=lambda limit: limit.nbytes)


def cgroup_limits(root: Path, proc: Path) -> list[HostLimit]:
    """The memory limits that are set for the cgroup of a process and for its parents, from the inside out.

    root: where the cgroups are mounted. proc: the process's /proc/PID/cgroup.
    """
    limits = []
    for path in _limit_files(root, proc):
        if path.exists() and (text := path.read_text().strip()) != "max" and int(text) < _UNLIMITED:
            limits.append(HostLimit(int(text), f"the cgroup limit {path}"))
    return limits


def memlock_limit(status: Path = Path("/proc/self/status")) -> HostLimit | None:
    """The limit of this process on mlock; None where it may lock anything.

    Memory that a device's driver pins does not count towards it.

    status: the file with the process's capabilities.
    """
    nbytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if nbytes == resource.RLIM_INFINITY or _capabilities(status) >> _CAP_IPC_LOCK & 1:
        return None
    return HostLimit(nbytes, "RLIMIT_MEMLOCK (ulimit -l)", per_process=True)


def _capabilities(status: Path) -> int:
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)


def _limit_files(root: Path, proc: Path) -> Iterator[Path]:
    """cgroup v2 keeps memory.max in each folder; v1 has a tree of its own for memory."""
    lines = proc.read_text().splitlines() if proc.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        folder = base / path.strip("/")
        yield from (parent / name for parent in (folder, *folder.parents) if parent.is_relative_to(base))

"""How much host memory this process may use: the container's limit where there is one, not the machine's RAM."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class HostLimit:
    nbytes: int
    source: str


def host_limit(cgroup_root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc/self/cgroup")) -> HostLimit:
    """The smallest of the machine's RAM and the memory limits of this process's cgroup and its parents."""
    limits = [HostLimit(psutil.virtual_memory().total, "the machine's RAM")]
    for path in _limit_files(cgroup_root, proc):
        if path.exists() and (text := path.read_text().strip()) != "max":
            limits.append(HostLimit(int(text), f"the cgroup limit {path}"))
    return min(limits, key=lambda limit: limit.nbytes)


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

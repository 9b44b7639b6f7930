"""The host memory that this process takes: the request, checked against its share of what there is.

That is the container's limit where there is one, or else the machine's RAM; or what the user says that there is.
"""

from __future__ import annotations

import os
import resource
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TypeAlias

import psutil

from ..allocators.slab import SlabPool
from ..sizes import format_bytes, parse_bytes

HostBytes: TypeAlias = int | float | str | None
"""How much host memory a user asks for: bytes, a part of what there is, a size such as "64GiB", or "auto"."""

_LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
_HOST_LIMIT = "TIERED_MEM_HOST_LIMIT"
# cgroup v1 writes "no limit" as a number: 2**63 less a page, which has up to 64 KiB.
_UNLIMITED = 1 << 62
_CAP_IPC_LOCK = 14


@dataclass(frozen=True, slots=True)
class HostLimit:
    """A limit of `nbytes`, for all processes of this machine or container together, or for each by itself."""

    nbytes: int
    source: str
    per_process: bool = False


def host_budget(
    asked: HostBytes, *, limits: Sequence[HostLimit], processes: int, given: int = 0, argument: str = "host_bytes"
) -> int:
    """Bytes of host memory for one manager, at least 1.

    A process's share of a limit is the limit divided by the processes. What other managers of the process have is
    not there any more. The smallest share counts.

    asked: None or "auto" is half of the share. A float above 0 and up to 1 is that part of it. An int, or a string
        such as "64GiB", is a number of bytes.
    limits: one or more. processes: how many share each limit that does not hold for each process by itself.
    given: the bytes that other managers of this process may take. It counts for such limits alone.
    argument: its name, for errors.

    Raises ValueError for more than the share, and for any other value.
    """
    if isinstance(asked, bool) or (isinstance(asked, float) and not 0 < asked <= 1):
        raise ValueError(
            f'{argument}={asked!r} is not a size: give an int of bytes, a string such as "64GiB", a float above 0 '
            'and up to 1 for that part of what this process may use, or "auto" for half of it'
        )
    limit = min(limits, key=lambda limit: _share(limit, processes, given))
    share = _share(limit, processes, given)
    if asked is None or asked == "auto":
        nbytes = share // 2
    elif isinstance(asked, float):
        nbytes = int(Fraction(asked) * share)
    else:
        nbytes = parse_bytes(asked, argument)
    if nbytes > share:
        raise ValueError(
            f"{argument}={asked!r} is {format_bytes(nbytes)}, more than {_allowance(limit, processes, given)}. "
            f"This process can ask for at most {share} bytes ({format_bytes(share)})"
        )
    if nbytes < 1:
        raise ValueError(
            f"{argument}={asked!r} is less than one byte of what {_allowance(limit, processes, given)}. "
            f"Ask for more, or raise that limit{', or close another manager first' if given else ''}"
        )
    return nbytes


def node_budget(asked: HostBytes, *, limits: Sequence[HostLimit], processes: int, given: int = 0) -> HostLimit:
    """What the processes of this machine share, each of which may take all of it.

    asked: None or "auto" is what all of them would have alone, together. All else is as for `host_budget`, of each
        limit as a whole.
    limits: those that hold for all processes together. given: the bytes that managers of this process may take
        that do not share.

    Raises ValueError as `host_budget` does.
    """
    if asked is None or asked == "auto":
        nbytes = processes * host_budget(asked, limits=limits, processes=processes, given=given)
        return HostLimit(nbytes, "what the ranks of this machine share")
    nbytes = host_budget(asked, limits=limits, processes=1, argument="node_bytes")
    return HostLimit(nbytes, f"node_bytes={asked!r}")


class PoolsOfProcess:
    """The pools that managers of this process have made: what one may take is not there for the next.

    It keeps none of them alive. Entered while a pool is made: another thread waits with its own.
    """

    def __init__(self) -> None:
        self._pools: weakref.WeakKeyDictionary[SlabPool, tuple[int, bool]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    @property
    def given(self) -> int:
        """The bytes that all may take that are not closed. Those that share have one part together."""
        shared = [nbytes for pool, (nbytes, shared) in list(self._pools.items()) if shared and not pool.closed]
        return self.given_alone + max(shared, default=0)

    @property
    def given_alone(self) -> int:
        """Of these, the bytes of pools that do not share."""
        return sum(nbytes for pool, (nbytes, shared) in list(self._pools.items()) if not (pool.closed or shared))

    def add(self, pool: SlabPool, nbytes: int, *, shared: bool) -> None:
        """Of a size that was agreed on while this was entered. nbytes: of a shared pool, an equal part."""
        self._pools[pool] = nbytes, shared

    def __enter__(self) -> PoolsOfProcess:
        self._lock.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def local_processes() -> int:
    """The number of training processes on this machine: LOCAL_WORLD_SIZE, which torchrun sets, or 1 without it.

    Raises ValueError where it is not a positive integer.
    """
    text = os.environ.get(_LOCAL_WORLD_SIZE, "1")
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(
            f"{_LOCAL_WORLD_SIZE}={text!r} in the environment is not a positive integer: it says how many "
            "processes train on this machine. Set it to that number, or unset it for one"
        )
    return int(text)


def host_limit(
    cgroup_root: Path = Path("/sys/fs/cgroup"),
    proc: Path = Path("/proc/self/cgroup"),
    modelled: HostLimit | None = None,
) -> HostLimit:
    """The smallest of the machine's RAM and the memory limits of this process's cgroup and its parents.

    The variable TIERED_MEM_HOST_LIMIT counts in their place, where a batch system has a limit that no cgroup shows;
    and without it `modelled`, where the run plans for another machine. Raises ValueError where it is not a size.
    """
    if text := os.environ.get(_HOST_LIMIT):
        try:
            return HostLimit(parse_bytes(text), f"{_HOST_LIMIT}={text} in the environment")
        except ValueError as error:
            raise ValueError(f"{_HOST_LIMIT} in the environment: {error}") from None
    if modelled is not None:
        return modelled
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


def _share(limit: HostLimit, processes: int, given: int) -> int:
    return limit.nbytes if limit.per_process else max(0, limit.nbytes // processes - given)


def _allowance(limit: HostLimit, processes: int, given: int) -> str:
    whose = "1 process" if processes == 1 else f"{processes} processes"
    if processes > 1:
        whose += " each" if limit.per_process else " together"
    if given and not limit.per_process:
        whose += f", less {format_bytes(given)} that other managers of this process may take"
    return f"{limit.source} allows ({format_bytes(limit.nbytes)} for {whose})"

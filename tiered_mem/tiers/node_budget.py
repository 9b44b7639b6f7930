"""One manager's part in what the ranks of a job share on one machine."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from ..allocators.base import HostPool
from ..allocators.slab import SlabPool
from ..errors import TierFull
from ..ground.stats import Stats
from ..sizes import format_bytes, parse_bytes
from .host_budget import HostBytes, local_processes
from .node_file import NodeFile
from .node_share import HOST, SPILL, WRITES, EqualShare, NodeShare, SharedKind, sign
from .node_verdicts import NodeVerdicts

# What tells a job from another one of the same user on the same machine.
_JOB = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
# Of the file: processes with another one do not share with these.
_FORMAT = "2"
# Others get a slab that nothing was cut from in so many steps. A pipeline begins one with each microbatch.
_UNUSED = 32

_log = logging.getLogger("tiered_mem.tiers")


class NodeBudget:
    """The shares of a manager: host memory, the room of drives, and what is written there. None is not shared.

    Where the file cannot be had by which the ranks know of each other, each keeps to an equal share, and a warning
    says so.

    environment: says which job and which rank this is. folder: of the file; None is the usual one.
    The rest, and the errors, are those of TieringManager.

    Attributes:
        ranks: How many ranks share, this one among them.
        shares_host: Host memory is to be shared, by `share_host`.
    """

    def __init__(
        self,
        host_bytes: HostBytes = None,
        host_pool: HostPool | None = None,
        node_bytes: HostBytes = None,
        node_spill_bytes: int | str | None = None,
        node_spill_write_budget: int | str | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        if host_pool is not None and node_bytes is not None:
            raise ValueError("host_pool comes in place of node_bytes: give either the one or the other")
        self.ranks = local_processes()
        self.asked = node_bytes
        several = self.ranks > 1 and host_bytes in (None, "auto") and host_pool is None
        self.shares_host = node_bytes is not None or several
        room, writes = (
            None if size is None else parse_bytes(size, kind.argument)
            for kind, size in ((SPILL, node_spill_bytes), (WRITES, node_spill_write_budget))
        )
        self._file = None
        self._join = partial(_joined, os.environ if environment is None else environment, self.ranks, folder)
        if self.shares_host or room or writes:
            self._file = self._join("share what it has, and each keeps to an equal part")
        self._pool: SlabPool | None = None
        self.host: NodeShare | EqualShare | None = None
        self.spill = None if room is None else self._share(SPILL, room)
        self.writes = None if writes is None else self._share(WRITES, writes)

    def share_host(self, nbytes: int, *, most: int, now: bool) -> NodeShare | EqualShare:
        """A share of the host memory of all, which is `nbytes`.

        most: what this manager may come to want. now: it takes all of that. Raises TierFull where there is less.
        """
        self.host = self._share(HOST, nbytes, most=most, now=now)
        return self.host

    def watch(self, pool: SlabPool) -> None:
        """Has the pool with the share of host memory give back what it does not use, where others want it."""
        self._pool = pool

    def begin_step(self) -> None:
        """Looks whether others want what this manager does not use. Where they do not it reads a number."""
        for share in (self.spill, self.writes):
            if share is not None:
                share.begin_step()
        if self.host is None or self._pool is None:
            return
        self._pool.begin_round()
        wanted = self.host.begin_step()
        surplus = self.host.taken - self.host.floor
        if wanted and surplus > 0:
            try:
                given = self._pool.trim(min(wanted, surplus), unused_for=_UNUSED)
            except RuntimeError as error:  # the slab stays in the pool, then
                _log.warning("%s", str(error))
                return
            if given:
                _log.info("other ranks get %s of host memory that was not used here", format_bytes(given))

    def counted_on(self) -> int | None:
        """The bytes of host memory that this manager may plan with. None where it shares none."""
        return None if self.host is None else self.host.counted_on()

    def full(self, needed: int, used: int) -> TierFull:
        """The error for a lack of host memory, of which this manager has `used`. Where it is shared."""
        if self.host is None:
            raise ValueError("this manager's host memory is not shared")
        return self.host.full(needed, used)

    def stats(self) -> Stats:
        """Bytes under names such as "node.used", as far as they are shared."""
        if self._file is not None:
            self._file.look()
        stats: Stats = {}
        for name, share in (("node", self.host), ("node.spill", self.spill), ("node.writes", self.writes)):
            if share is not None:
                stats |= {f"{name}.bytes": share.limit, f"{name}.used": share.used(), f"{name}.own": share.taken}
        if self.host is not None:
            stats |= {"node.floor": self.host.floor, "node.ranks": self.host.ranks()}
        return stats

    def verdicts(self) -> NodeVerdicts | None:
        """For what the ranks tell each other of their device budgets. None where there is nobody to be told."""
        if self.ranks > 1 and self._file is None:
            self._file = self._join("tell each other of budgets that are too small")
        return None if self.ranks == 1 or self._file is None else NodeVerdicts(self._file)

    def leave(self) -> None:
        """Gives all up. Idempotent."""
        if self._file is not None:
            self._file.close()

    def _share(
        self, kind: SharedKind, nbytes: int, *, most: int | None = None, now: bool = False
    ) -> NodeShare | EqualShare:
        if self._file is None:
            return EqualShare(kind, nbytes, self.ranks)
        most = nbytes if most is None else most
        return NodeShare(self._file, kind, nbytes, self.ranks, most=most, now=now)


def job_of(environment: Mapping[str, str], ranks: int) -> str:
    """16 digits that are the same for all ranks of a job on this machine, and others for any other job.

    A job is known by what torchrun tells its ranks. A process that is told nothing, and is the only rank, is a job
    by itself. Containers are machines of their own, also where they share /dev/shm.
    """
    words = [_FORMAT, str(os.stat("/proc/self/ns/pid").st_ino), *(environment.get(name, "") for name in _JOB)]
    if ranks == 1 and not any(environment.get(name) for name in _JOB):
        words.append(str(os.getpid()))
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]


def _joined(environment: Mapping[str, str], ranks: int, folder: Path | None, what_for: str) -> NodeFile | None:
    """The file of this job, with a record for one more manager. None, with a warning, where it cannot be had."""
    if folder is None:
        memory = Path("/dev/shm")
        folder = (memory if memory.is_dir() else Path(tempfile.gettempdir())) / f"tiered_mem-node-{os.geteuid()}"
    try:
        file = NodeFile(folder, job_of(environment, ranks))
    except OSError as error:
        _log.warning("the ranks of this machine cannot %s: %s: %s", what_for, folder, str(error))
        return None
    sign(file, environment.get("LOCAL_RANK", ""))
    return file

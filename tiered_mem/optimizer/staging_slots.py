"""The host slots of a staging."""

from __future__ import annotations

from typing import NamedTuple

from ..spill.io_queue import Job
from ..tiers import HostSlot, HostTier
from ..transfer import Ticket
from .residence import Exclusive, reserve, wait_for


class StagingSlots:
    """Host slots of one size: `wanted` of them from now to `close`, and more where `more` is called.

    A slot is given back with what may still use it, and is free when that has ended.

    Raises TierFull where the host tier has no room for that many.
    """

    def __init__(self, host: HostTier, exclusive: Exclusive, nbytes: int, wanted: int) -> None:
        self._host = host
        self._exclusive = exclusive
        self._wanted = wanted
        self._free: list[HostSlot] = []
        self._used: list[_Used] = []
        self.nbytes = nbytes
        self.count = 0
        advice = f"{wanted} such slots are to stage optimizer states: raise host_bytes or lower bucket_bytes"
        try:
            for _ in range(wanted):
                self._free.append(self.more(advice))
        except BaseException:
            self.close()
            raise

    def get(self) -> HostSlot | None:
        """A free slot, if there is one."""
        self.collect()
        return self._free.pop() if self._free else None

    def more(self, advice: str) -> HostSlot:
        """Another slot of the host tier. Raises TierFull with the advice."""
        slot = reserve(self._host, self._exclusive, self.nbytes, advice)
        self.count += 1
        return slot

    def give_back(self, slot: HostSlot, last: Ticket | None = None, job: Job | None = None) -> None:
        """last: the copy that ends after all others of the slot. job: what reads or fills it."""
        self._used.append(_Used(slot, last, job))
        self.collect()

    def collect(self) -> None:
        """Takes note of what has ended. Does not wait."""
        for used in [used for used in self._used if used.ended()]:
            self._used.remove(used)
            if self.count <= self._wanted:
                self._free.append(used.slot)
            else:
                self._release(used.slot)

    def wait(self) -> bool:
        """Waits for what has used a slot the longest. False if there is none."""
        if not self._used:
            return False
        used = self._used[0]
        wait_for(used.last)
        if used.job is not None:
            used.job.wait()
        self.collect()
        return True

    def close(self) -> None:
        """Gives the host tier all slots that were given back, after what uses them."""
        self._wanted = 0
        while self.wait():
            pass
        while self._free:
            self._release(self._free.pop())

    def _release(self, slot: HostSlot) -> None:
        self.count -= 1
        with self._exclusive:
            self._host.release(slot, None)


class _Used(NamedTuple):
    """A slot that was given back, and what may still use it."""

    slot: HostSlot
    last: Ticket | None
    job: Job | None

    def ended(self) -> bool:
        return (self.last is None or self.last.event.query()) and (self.job is None or self.job.done)

"""Host slots that are set aside for one use."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple

from ..device.transfer import Ticket
from ..errors import TierFull
from ..spill.lower_tier import Job
from .host_slab import flat_form
from .host_tier import HostSlot, HostTier

# Inside, the host tier is the caller's alone.
Exclusive = AbstractContextManager[None]


class FixedSlots:
    """Host slots of `nbytes` bytes: `wanted` of them from now to `close`, and more where `more` is called.

    A slot is freed with what may still use it, and is there again when that has ended.

    exclusive: entered around each use of the host tier, and not while this waits for anything.
    count: how many slots there are now.

    Raises TierFull, with this advice, where the host tier has no room for that many; then there is none.
    """

    def __init__(self, host: HostTier, exclusive: Exclusive, nbytes: int, wanted: int, advice: str) -> None:
        self._host = host
        self._exclusive = exclusive
        self._wanted = wanted
        self._free: list[HostSlot] = []
        self._used: list[_Used] = []
        self.nbytes = nbytes
        self.count = 0
        try:
            for _ in range(wanted):
                self._free.append(self.more(advice))
        except BaseException:
            self.close()
            raise

    def get(self) -> HostSlot | None:
        """A free slot, if there is one."""
        self.poll()
        return self._free.pop() if self._free else None

    def more(self, advice: str) -> HostSlot:
        """Another slot of the host tier. Raises TierFull with the advice, as the tier knows only of activations."""
        try:
            with self._exclusive:
                (slot,) = self._host.reserve([flat_form(self.nbytes)])
        except TierFull as error:
            raise TierFull(
                "host", needed=error.needed, free=error.free, used=error.used, limit=error.limit, advice=advice
            ) from None
        self.count += 1
        return slot

    def free(self, slot: HostSlot, last: Ticket | None = None, job: Job | None = None) -> None:
        """last: the copy that ends after all others of the slot. job: what writes it to a file, or fills it."""
        self._used.append(_Used(slot, last, job))
        self.poll()

    def poll(self) -> None:
        """Takes note of what has ended. Does not wait."""
        for used in [used for used in self._used if used.ended()]:
            self._used.remove(used)
            if self.count <= self._wanted:
                self._free.append(used.slot)
            else:
                self._return(used.slot, None)

    def wait(self) -> bool:
        """Waits for what has used a slot the longest. False if there is none. Raises DeviceFailed."""
        if not self._used:
            return False
        _, last, job = self._used[0]
        if last is not None:
            last.wait()
        if job is not None:
            job.wait()
        self.poll()
        return True

    def close(self) -> None:
        """Returns all slots that were freed to the host tier, after the file operations that use them."""
        for slot, last, job in [*self._used, *(_Used(slot) for slot in self._free)]:
            if job is not None:
                job.wait()
            self._return(slot, last)
        self._used.clear()
        self._free.clear()

    def _return(self, slot: HostSlot, last: Ticket | None) -> None:
        self.count -= 1
        with self._exclusive:
            self._host.release(slot, None if last is None else last.event)


class _Used(NamedTuple):
    """A slot that was freed, and what may still use it."""

    slot: HostSlot
    last: Ticket | None = None
    job: Job | None = None

    def ended(self) -> bool:
        return (self.last is None or self.last.event.query()) and (self.job is None or self.job.done)

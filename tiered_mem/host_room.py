"""Room in the host tier for what comes next."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence

from . import policies
from .block import Block
from .policies import Action
from .spiller import Spiller
from .stats import Counters
from .tiers import HostTier
from .trace import Trace

# The share of the host tier above which blocks go down to disk, so that what comes next finds room.
_HIGH_WATER = 0.75

# Asked with a number of bytes of host memory; answers which blocks may go down to disk. Other actions than Release
# and Spill are passed over.
Advise = Callable[[int], Iterable[Action]]
Release = Callable[[Sequence[Block]], None]


class HostRoom:
    """Lets blocks go down to disk before the host tier is full, and waits for room where there is no other way.

    spiller: None where there is no disk tier. Then all room comes from slots that are on their way back.
    advise: its answers to Spill and Release are done, the latter by `release`.
    blocks: those that exist, by key.
    """

    def __init__(
        self,
        host: HostTier,
        spiller: Spiller | None,
        advise: Advise,
        blocks: Mapping[int, Block],
        counters: Counters,
        trace: Trace | None,
    ) -> None:
        self._host = host
        self._spiller = spiller
        self._advise = advise
        self._blocks = blocks
        self._counters = counters
        self._trace = trace

    def make(self, nbytes: int, release: Release) -> bool:
        """Makes or waits for room. Whether there may be so much by now; False if there is nothing to wait for."""
        spiller = self._spiller
        if spiller is not None:
            if spiller.collect():
                return True
            used = self._host.pool_stats().used
            self._relieve(spiller, nbytes, release)
            if self._host.pool_stats().used < used:
                return True
        if not (self._host.waits or (spiller is not None and spiller.busy)):
            return spiller is not None and spiller.drop_clean(nbytes)
        self._counters.host_waits += 1
        with self.waiting():
            return self._host.wait() or (spiller is not None and spiller.wait())

    def keep(self, release: Release) -> None:
        """Begins to make room where the tier is nearly full. Does not wait."""
        if self._spiller is None:
            return
        stats = self._host.pool_stats()
        if stats.capacity is not None:
            above = stats.used - int(_HIGH_WATER * stats.capacity)
            if above > 0:
                self._relieve(self._spiller, above, release)

    def begin_step(self) -> None:
        """A step begins. Waits for slots of steps long past, which would otherwise be taken anew in each step."""
        self._host.begin_step()
        if self._host.overdue:
            self._counters.step_waits += 1
            with self.waiting():
                while self._host.overdue:
                    self._host.wait()

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the host waits, of which a trace is told."""
        return self._trace.host_waits() if self._trace is not None else contextlib.nullcontext()

    def _relieve(self, spiller: Spiller, nbytes: int, release: Release) -> None:
        """Begins to write as much as gives so many bytes of host memory, with what is under way already."""
        missing = nbytes - spiller.going_down
        if missing > 0 and spiller.accepting:
            spiller.spill_later(missing)
        told: set[Action] = set()
        while (missing := nbytes - spiller.going_down) > 0 and spiller.accepting:
            # The same advice again, or about a block that does not exist, is none.
            actions = {action: None for action in self._advise(missing) if action.key in self._blocks}
            new = [action for action in actions if action not in told]
            if not new:
                return
            told.update(new)
            release([self._blocks[action.key] for action in new if isinstance(action, policies.Release)])
            spiller.spill([self._blocks[action.key] for action in new if isinstance(action, policies.Spill)])

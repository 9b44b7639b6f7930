"""Room in the host tier for what comes next."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence

from ..ground.stats import Counters
from ..policies.base import Action
from ..tiers.host_tier import HostTier
from ..trace.recorder import Trace
from .spiller import Spiller

# The share of the host tier above which blocks go down to disk, so that what comes next finds room.
_HIGH_WATER = 0.75

# Asked with a number of bytes of host memory; answers which blocks may go down to disk. Other actions than Release
# and Spill are passed over.
Advise = Callable[[int], Iterable[Action]]


class HostRoom:
    """Says what has to go down to disk before the host tier is full, and waits for room where nothing else helps.

    spiller: None where there is no disk tier. Then all room comes from slots that are on their way back.
    planned: whether the policy has planned what goes to disk. It is asked then only when nothing is on its way that
    makes room, and not before the tier is full.
    """

    def __init__(
        self,
        host: HostTier,
        spiller: Spiller | None,
        advise: Advise,
        planned: Callable[[], bool],
        counters: Counters,
        trace: Trace | None,
    ) -> None:
        self._host = host
        self._spiller = spiller
        self._advise = advise
        self._planned = planned
        self._counters = counters
        self._trace = trace

    @property
    def above(self) -> int:
        """By how many bytes the tier is too full for what comes next, if there is a disk to take them."""
        if self._spiller is None or self._planned():
            return 0
        stats = self._host.pool_stats()
        return 0 if stats.capacity is None else max(0, stats.used - int(_HIGH_WATER * stats.capacity))

    def wait(self, nbytes: int) -> bool:
        """Waits for room. Whether there may be so much by now; False if there is nothing to wait for."""
        spiller = self._spiller
        if not (self._host.waits or (spiller is not None and spiller.busy)):
            return spiller is not None and spiller.drop_clean(nbytes)
        self._counters.host_waits += 1
        with self.waiting():
            return self._host.wait() or (spiller is not None and spiller.wait())

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

    def relief(self, nbytes: int, blocks: Container[int]) -> Iterator[Sequence[Action]]:
        """Answers of the policy that let so many bytes of host memory come free, with what is under way already.

        Each has to be done before the next is asked for. The same advice again, or about a block that is not among
        these, is none.
        """
        spiller = self._spiller
        if spiller is None or (self._planned() and (self._host.waits or spiller.busy)):
            return
        missing = nbytes - spiller.going_down
        if missing > 0 and spiller.accepting:
            spiller.spill_later(missing)
        told: set[Action] = set()
        while (missing := nbytes - spiller.going_down) > 0 and spiller.accepting:
            advice = dict.fromkeys(self._advise(missing))
            new = [action for action in advice if action not in told and action.key in blocks]
            if not new:
                return
            told.update(new)
            yield new

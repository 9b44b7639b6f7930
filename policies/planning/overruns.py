"""Says that steps took more than the budget: once for each cause, with what would help."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from ...sizes import format_bytes

_log = logging.getLogger("tiered_mem.policies")


class OverrunCause(Enum):
    """When a step took the most, and why no plan has kept it from that."""

    AFTER = "after the last use of what was saved, as a rule in the optimizer's step or an evaluation"
    SMALL = "tensors below min_bytes filled it, which has fallen by itself: more moves from the next step on"
    NOTHING = "nothing that it saved for backward could move"
    TWICE = "backward came to the same graph more than once, for which there are no plans"
    UNFINISHED = "backward did not use most of what was saved, and no plan can be made from that"
    NEW = "no step like it was known"
    PLANNED = "it took more than the step that its plan was made for"


# Beside a larger budget, which always helps.
_HELPS: dict[OverrunCause, str] = {
    OverrunCause.AFTER: "evaluations in smaller batches, and with no_grad()",
    OverrunCause.SMALL: "nothing, if it is the last time; a smaller min_bytes from the beginning",
    OverrunCause.NOTHING: "checkpoints, or smaller batches",
    OverrunCause.TWICE: "one backward of the sum of the losses; checkpoints, or smaller batches",
    OverrunCause.UNFINISHED: "forwards without a backward under no_grad(); smaller batches",
    OverrunCause.NEW: "nothing, if steps like it follow: they go by a plan",
    OverrunCause.PLANNED: "nothing, if it is the last time: plans leave as much more free now",
}


@dataclass(frozen=True)
class Overrun:
    """A step that took more than the budget. In bytes.

    step: its number. peak: the most that was allocated. budget: what should have been. blocks: of the peak, those
    in blocks, which can move, but for some that are in use. stayed: what else its layers saved, by the reason for
    which it cannot, in words. registered: an optimizer is.
    """

    step: int
    peak: int
    budget: int
    cause: OverrunCause
    blocks: int
    stayed: Mapping[str, int]
    registered: bool = False

    def __str__(self) -> str:
        largest = sorted(self.stayed.items(), key=lambda each: each[1], reverse=True)
        told = "".join(f"; its layers saved {format_bytes(nbytes)} {why}" for why, nbytes in largest[:2])
        peak, over, rest = map(format_bytes, (self.peak, self.peak - self.budget, self.peak - self.blocks))
        helps = _HELPS[self.cause]
        if self.cause is OverrunCause.AFTER:
            helps += f"; {'smaller bucket_bytes' if self.registered else 'register_optimizer()'}"
        return (
            f"step {self.step} took {peak} of the device, {over} more than the budget of "
            f"{format_bytes(self.budget)}: {self.cause.value}. {format_bytes(self.blocks)} of it were in blocks, "
            f"which can move, and {rest} were not{told}. What helps: a budget of {peak}; {helps}"
        )


@dataclass
class Overruns:
    """Those of one policy. Each cause is said once."""

    _said: set[OverrunCause] = field(default_factory=set)

    def see(self, overrun: Overrun) -> None:
        if overrun.cause not in self._said:
            self._said.add(overrun.cause)
            _log.warning("%s. It is said once for this cause", overrun)

"""Has all ranks of a machine end with the same error where the budget of one of them is too small."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from .choose_policy import Rehearsal
from .device.device import Device, DevicePeak
from .ground.interrupts import interruptible, uninterrupted
from .ground.turn import Turn
from .policies.base import Policy
from .policies.planned import PlannedPolicy
from .policies.planning.profile import BudgetTooSmall
from .sizes import format_bytes
from .tiers.node_budget import NodeBudget
from .tiers.node_verdicts import NodeVerdicts, TooSmall

# A rank waits so long for the others, once.
_PATIENCE_S = 60.0
# After so many forwards without a step of one of torch's optimizers there is none to wait for.
_WITHOUT_STEP = 4096

_log = logging.getLogger("tiered_mem.agreement")


class Agreement:
    """When a manager tells the other ranks whether its budget is enough, and when it hears of theirs.

    It says so when the first optimizer step of its process is over. By then it has seen a whole step, for which it
    needed nothing of what another rank does after that one's optimizer step. So each rank comes as far as this,
    whatever the others wait for, in any pipeline. It waits for their words when its next forward begins: the first
    and only time that a rank waits for another one.

    policy: of the manager. It raises no BudgetTooSmall by itself until all have spoken.
    """

    def __init__(
        self, policy: PlannedPolicy, verdicts: NodeVerdicts, device: Device, turn: Turn[Any], peak: DevicePeak
    ) -> None:
        self._policy = policy
        self._verdicts = verdicts
        self._device = device
        self._turn = turn
        self._peak = peak
        self._forwards = 0
        self._short: BudgetTooSmall | None = None
        self._said = self._settled = False
        policy.alone = False
        this = weakref.ref(self)
        # One that is forgotten leaves a hook that does nothing: the collector must not take it out while torch goes
        # through its hooks.
        self._hook = register_optimizer_step_post_hook(lambda *_: _stepped(this()))

    @interruptible
    def forward_begins(self) -> None:
        """Raises BudgetTooSmall where it has been said on any rank that no plan can keep the budget."""
        if self._settled:
            return
        if not self._forwards:
            self._verdicts.begin()
        self._forwards += 1
        if self._said:
            self._settle(self._verdicts.wait(_PATIENCE_S))
        elif self._forwards == _WITHOUT_STEP:
            self._settle(None)

    @uninterrupted
    def stepped(self) -> None:
        """An optimizer of this process has made a step."""
        if self._said or not self._forwards or self._turn.mine:
            return
        # Then all whose work this rank's needed have begun, and none needs any more of this step.
        self._device.synchronize()
        self._short = short = self._shortfall()
        self._said = True
        if short is None:
            self._verdicts.say()
        else:
            _log.error("%s. The other ranks of this machine hear of it, and end too", str(short))
            self._verdicts.say(short.floor, short.budget)

    def close(self) -> None:
        """Takes no part any more. Idempotent."""
        self._settled = self._policy.alone = True
        self._hook.remove()

    def _shortfall(self) -> BudgetTooSmall | None:
        with self._turn:
            return self._policy.shortfall(self._peak.look())

    @uninterrupted
    def _settle(self, missing: Sequence[str] | None) -> None:
        """missing: who has said nothing. None: this one has no step to speak of, and ends alone if it must."""
        if missing is None:
            if (alone := self._shortfall()) is not None:
                self.close()
                raise alone
            return
        self.close()
        if missing:
            _log.warning(
                "%s did not say in %.0f s whether the budget there is enough: no optimizer has made a step there "
                "since its first forward. It is not waited for any more",
                *(" and ".join(missing), _PATIENCE_S),
            )
        if short := self._verdicts.too_small():
            raise BudgetOfRankTooSmall(short) from self._short


class BudgetOfRankTooSmall(BudgetTooSmall):
    """The budget of a rank of this machine is too small, and all ranks that have one end with this.

    ranks: those whose budgets are too small.
    """

    def __init__(self, ranks: Sequence[TooSmall]) -> None:
        worst = max(ranks, key=lambda rank: rank.needs - rank.has)
        super().__init__(worst.has, worst.needs, 0, worst.needs)
        told = "; ".join(
            f"the budget of {rank} is {format_bytes(rank.has)}, below {format_bytes(rank.needs)}, the least that "
            "its step can be run in"
            for rank in ranks
        )
        more = [f"{format_bytes(rank.needs - rank.has)} of budget more on {rank}" for rank in ranks]
        self.args = (
            f"all ranks of this machine end here: {told}. What helps: {'; '.join(more)}; fewer layers there, or "
            "smaller microbatches. The log of that rank says what takes so much",
        )


def agreed(policy: Policy, node: NodeBudget, device: Device, turn: Turn[Any], peak: DevicePeak) -> Agreement | None:
    """For a manager that plans, and is one of several ranks. None for others, and where each rank is rehearsed."""
    if not isinstance(policy, PlannedPolicy) or isinstance(policy, Rehearsal):
        return None
    verdicts = node.verdicts()
    return None if verdicts is None else Agreement(policy, verdicts, device, turn, peak)


def _stepped(agreement: Agreement | None) -> Any:
    if agreement is not None:
        agreement.stepped()

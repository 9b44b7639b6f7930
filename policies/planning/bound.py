"""What no plan can better: the least memory, and the least time within a budget."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from ...sizes import format_bytes
from .link import Link
from .moments import Moments


class BudgetTooSmall(ValueError):
    """No plan keeps the budget.

    Args:
        budget: In bytes.
        floor: The least budget that the step can be run in, in bytes.
        position: Where it is needed.
        unmovable: The part of the floor that is no block; the rest is in use there.
        where: The position and what is there, in words.
        helps: What would help.
    """

    def __init__(
        self,
        budget: int,
        floor: int,
        position: int,
        unmovable: int,
        where: str | None = None,
        helps: Sequence[str] = (),
    ) -> None:
        self.budget, self.floor, self.position, self.unmovable = budget, floor, position, unmovable
        super().__init__(
            f"the budget of {format_bytes(budget)} is below {format_bytes(floor)}, the least that this step can "
            f"be run in. In {where or f'position {position}, {format_bytes(unmovable)} cannot move'}. What helps: "
            f"{'; '.join((*helps, f'{format_bytes(floor - budget)} of budget more'))}"
        )


def floor(moments: Moments) -> tuple[int, int, int]:
    """The least budget that a plan can keep, the moment that needs it, and the bytes there that are no blocks.

    At each moment, what cannot move and the blocks in use, with those that forward still has.
    """
    change = [0] * (len(moments) + 1)  # of the bytes that may be away
    for n, free, u in zip(moments.nbytes, moments.loose, moments.used, strict=True):
        if free < u:
            change[free] += n
            change[u] -= n
    least = list(map(int.__sub__, moments.full, accumulate(change)))
    if not least:
        return 0, 0, 0
    worst = least.index(max(least))
    lives = zip(moments.nbytes, moments.saved, moments.dropped, strict=True)
    return least[worst], worst, moments.full[worst] - sum(n for n, s, d in lives if s <= worst < d)


def least_seconds(moments: Moments, budget: int, link: Link) -> float:
    """The least time of the step within the budget, on a link without latency and contention.

    At a moment that needs so many bytes away, these were copied out after they were saved, and are copied back
    before they are used. It holds for parts of blocks too, and in any order. It leaves out that both directions
    need the same set.
    """
    out_rate, back_rate = link.out, link.back
    saves = [0] * (len(moments) + 1)
    uses = [0] * (len(moments) + 1)
    for n, s, u in zip(moments.nbytes, moments.saved, moments.used, strict=True):
        saves[s] += n
        uses[u] += n
    later = moments.total
    before = need = 0
    now = 0.0  # the earliest time of the moment
    copying = 0.0  # when copying without a pause must have begun for all that was saved before to be out
    returned = float("-inf")  # when all that was away would be back
    last = 0.0
    for full, at, save, use in zip(moments.full, moments.clock, saves, uses):  # noqa: B905 - these have an end
        now += at - last
        last = at
        if need > 0 and now + need / back_rate > returned:
            returned = now + need / back_rate
        if use:
            later -= use
        if returned - later / back_rate > now:
            now = returned - later / back_rate
        if now - before / out_rate > copying:
            copying = now - before / out_rate
        need = full - budget
        if need > 0 and copying + need / out_rate > now:
            now = copying + need / out_rate
        before += save
    return now + moments.end - last

"""One training behind one link, in a process of its own: `python -m benchmarks.planned.child MODEL LINK SHARE...`.

Writes a line of JSON for each thing that was measured, and one with the rows of the table.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .links import LATENCY, LINKS, start

if TYPE_CHECKING:
    from .contest import Measured


def main() -> int:
    model, link, *shares = sys.argv[1:]
    there = LINKS[link]
    start(there)
    from tiered_mem.policies.planning.profile import Link  # torch must find the device

    from .contest import Contest
    from .trainings import TRAININGS

    contest = Contest(TRAININGS[model], Link(there.out, there.back, latency=LATENCY))
    tried: dict[str, list[Measured]] = {}
    for name, settings in (
        ("layer_order", contest.layer_orders()),
        ("megatron", contest.megatrons()),
        ("checkpoint", contest.checkpoints("full")),
        ("selective", contest.checkpoints("selective")),
        ("inputs_moved", contest.inputs_moved()),
    ):
        tried[name] = []
        for made in settings:
            tried[name].append(made)
            say(doing=f"{name}, {made.setting}")
    budgets = [contest.budget(float(share)) for share in shares]
    swaps = []
    for budget in budgets:
        swaps.append(contest.smart_swap(budget))
        say(doing="SmartSwap")
    rows: list[dict[str, Any]] = []
    for share, budget, swap in zip(shares, budgets, swaps, strict=True):
        try:
            auto, error = asdict(contest.auto(budget)), None
        except ValueError as refused:  # no plan keeps the budget
            auto, error = None, str(refused)
        say(doing=f"auto, {float(share):.0%}")
        rows.append(
            {
                "share": float(share),
                "budget": budget,
                "least": contest.least(budget),
                "bound": contest.bound(budget),
                "foreseeable": contest.foreseeable(budget),
                "auto": auto,
                "error": error,
                **{name: best(found, budget) for name, found in tried.items()},
                "smart_swap": asdict(swap),
            }
        )
    say(
        model=model,
        link=link,
        layers=contest.layers,
        blocks=len(contest.profile.nbytes),
        floor=contest.floor,
        repeatable=contest.repeatable,
        plain=asdict(contest.plain),
        rows=rows,
    )
    return 0


def best(found: Sequence[Measured], budget: int) -> dict[str, Any] | None:
    """The fastest of those within the budget."""
    within = (each for each in found if each.peak <= budget)
    fastest = min(within, key=lambda each: each.seconds, default=None)
    return None if fastest is None else asdict(fastest)


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    sys.exit(main())

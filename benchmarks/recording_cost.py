"""What it costs a training to be recorded and timed: `python -m benchmarks.recording_cost MODEL...`.

On the modelled clock of a dry run, so that it is the same on each machine. A recorded step is set beside the same
one under the same LRUPolicy that asks for nothing. A timed step, with the reading of its times, is set beside the
others of the same plan. Each step is from an idle device to an idle device. Writes a line of JSON: by model the
shares by which they are longer.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING

import ascend_emulator

from benchmarks.planned.links import LINKS, start
from tiered_mem.policies import Link, LRUPolicy, PlannedPolicy, Policy
from tiered_mem.policies.base import ExactMemory, OnRequest, Refused, StepBegin, StepEnd, StepMeasured, Used

if TYPE_CHECKING:
    from benchmarks.planned.trainings import Training

_SHARE = 0.5  # of the way from the least that a plan can keep to what the plain step takes
_CYCLE = 4  # steps from one that is timed to the next


class Unrecorded(LRUPolicy):
    """Is told of each block and of each use at once, as who records."""

    gather_bytes = 1
    asks: Collection[type[OnRequest]] = (Used,)


class Recorded(Unrecorded):
    """Is told all that a step is recorded by."""

    asks = (Used, StepBegin, StepEnd, ExactMemory, StepMeasured, Refused)


def seconds(training: Training, policy: Policy, steps: int) -> list[float]:
    """Of each step."""
    import torch

    from tiered_mem import TieringManager

    found = []
    manager = TieringManager(policy=policy, device="npu", host_bytes="500GiB", preallocate=False)
    with manager, manager.attach(training.model):
        for number in range(steps):
            torch.npu.synchronize()
            began = ascend_emulator.now()
            training.step(number)
            torch.npu.synchronize()
            found.append(ascend_emulator.now() - began)
    return found


def shares(name: str, link: Link) -> dict[str, float]:
    from benchmarks.planned.contest import Contest
    from benchmarks.planned.trainings import TRAININGS

    contest = Contest(TRAININGS[name], link)
    budget = contest.budget(_SHARE)
    kept = (budget - contest.profile.standing[0]) // 2
    del contest  # its training would count
    gc.collect()
    planned = seconds(TRAININGS[name](), PlannedPolicy(budget, link), 4 * _CYCLE)[-_CYCLE:]
    gc.collect()
    training = TRAININGS[name]()
    # What a step has cost is read when the next one begins.
    _, *plain = seconds(training, Unrecorded(kept), 3)
    _, *recorded = seconds(training, Recorded(kept), 3)
    timed = sum(planned) - _CYCLE * min(planned)
    return {"recorded": sum(recorded) / sum(plain) - 1, "timed": timed / min(planned)}


def main() -> None:
    there = LINKS["910b-25"]
    start(there)
    link = Link(there.out, there.back)
    print(json.dumps({name: shares(name, link) for name in sys.argv[1:]}))


if __name__ == "__main__":
    main()

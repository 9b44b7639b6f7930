"""What it costs a training to be recorded and timed for policy="auto": `python -m benchmarks.recording_cost MODEL...`.

On the modelled clock of a dry run, so that it is the same on each machine. A recorded step is set beside the same one
under the same LRUPolicy that asks for nothing, and a step of a plan that is timed beside those that are not. From an
idle device to an idle device. Writes one line of JSON: the shares by which they are longer, by model.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING

import ascend_emulator

from tiered_mem.policies import Link, LRUPolicy, PlannedPolicy, Policy
from tiered_mem.policies.base import ExactMemory, OnRequest, Refused, StepBegin, StepEnd, StepMeasured, Used

if TYPE_CHECKING:
    from benchmarks.planned.trainings import Training

_HOST = "1TiB"
_RATE = 25_000_000_000
_GIB = 1 << 30
_STEPS = 10


class GatheringLRU(LRUPolicy):
    """Is told of each block at once."""

    gather_bytes = 1


class RecordedLRU(GatheringLRU):
    """Is told all that a step is recorded by."""

    asks: Collection[type[OnRequest]] = (Used, StepBegin, StepEnd, ExactMemory, StepMeasured, Refused)


class Times:
    """Whether each step of a planned policy was timed, and then its seconds."""


def seconds(training: Training, policy: Policy, steps: int) -> list[tuple[float, bool]]:
    """Of each step, from an idle device to an idle device, and whether it was timed to its end."""
    import torch

    from tiered_mem import TieringManager

    found = []
    manager = TieringManager(policy=policy, device="npu", host_bytes="500GiB", preallocate=False)
    with manager, manager.attach(training.model):
        for number in range(steps):
            torch.npu.synchronize()
            began = ascend_emulator.now()
            training.step(number)
            timed = StepMeasured in getattr(policy, "asks", ())
            torch.npu.synchronize()
            found.append((ascend_emulator.now() - began, timed))
    return found


def main() -> None:
    os.environ["TIERED_MEM_HOST_LIMIT"] = _HOST
    ascend_emulator.start(
        hbm_bytes="400GiB",
        host_bytes=_HOST,
        clock="910b3",
        dry=True,
        schedule="eager",
        races=False,
        h2d_bytes_per_s=_RATE,
        d2h_bytes_per_s=_RATE,
    )
    logging.getLogger("tiered_mem").setLevel(logging.ERROR)
    from benchmarks.planned.contest import Contest
    from benchmarks.planned.trainings import TRAININGS

    for name in sys.argv[1:]:
        gc.collect()
        contest = Contest(TRAININGS[name], Link(_RATE, _RATE))
        budget = max(contest.budget(0.4), contest.plain.peak * 9 // 10)
        training = TRAININGS[name]()
        training.step(0)
        lru = budget // 8
        plain = seconds(training, GatheringLRU(lru), 3)
        recorded = seconds(training, RecordedLRU(lru), 3)
        auto = seconds(training, PlannedPolicy(budget, Link(_RATE, _RATE)), _STEPS)
        print(name, len(contest.recording.names), len(contest.recording.blocks), contest.plain.seconds)
        print([s for s, _ in plain], [s for s, _ in recorded])
        print([(round(s * 1e3, 3), t) for s, t in auto])


if __name__ == "__main__":
    main()

"""What policy="auto" costs the host: planning, deciding, and recording.

    python -m benchmarks.planning_cost

No device is needed. Times are the calling thread's own, and medians. A plan is made for training steps of 400 and
of 5,000 blocks, of which half have to leave. A decision is the mean over all events of a step that plays a plan, with
the word about memory before each, beside LayerOrderPolicy's over the events that it is told.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.report import report
from tests.policies.simulated.machine import Machine
from tests.policies.simulated.steps import Op, Step, budget_between, build, profile
from tiered_mem.policies import Action, Event, LayerOrderPolicy, Link, LRUPolicy, PlannedPolicy, Policy
from tiered_mem.policies.planning import plan

MIB = 1 << 20
LINK = Link(50e9, 50e9)
BLOCKS_OF_A_LAYER = 12


class Timed:
    """A policy, and the seconds that the calling thread took for its answers."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.seconds = 0.0
        self.events = 0

    @property
    def asks(self) -> Collection[type[Event]]:
        return getattr(self._policy, "asks", ())

    def check(self, num_layers: int) -> None:
        self._policy.check(num_layers)

    def decide(self, event: Event) -> Sequence[Action]:
        begun = time.thread_time()
        answer = self._policy.decide(event)
        self.seconds += time.thread_time() - begun
        self.events += 1
        return answer


def step_of(layers: int) -> Step:
    layer = [Op((2e-4, 4e-4), [8 * MIB], (8 * MIB, 8 * MIB)) for _ in range(BLOCKS_OF_A_LAYER)]
    return build([layer] * layers, [4 * MIB] * layers)


def planning(blocks: int, rounds: int) -> float:
    """Milliseconds of one plan, with its passes over the profile."""
    known = profile(step_of(blocks // BLOCKS_OF_A_LAYER))
    budget = budget_between(known, 0.5)
    found = []
    for _ in range(rounds):
        known.__dict__.pop("moments", None)  # it is made once for a profile
        begun = time.thread_time()
        plan(known, budget, LINK)
        found.append(time.thread_time() - begun)
    return 1e3 * statistics.median(found)


def deciding(policy: Policy, step: Step, rounds: int) -> list[tuple[float, int]]:
    """Of each step: the seconds of its decisions, and the number of events that are no word about memory."""
    timed = Timed(policy)
    machine = Machine(timed, LINK)
    found = []
    for _ in range(rounds):
        timed.seconds, timed.events = 0.0, 0
        gc.disable()  # the machine's garbage, not the policy's
        outcome = machine.run(step)
        gc.enable()
        found.append((timed.seconds, len(outcome.log)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planning_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=15, help="of each measurement (default: 15)")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    options = parser.parse_args()
    step = step_of(400 // BLOCKS_OF_A_LAYER)
    budget = budget_between(profile(step), 0.5)
    found = {}
    clock = deciding(Nothing(), step, options.rounds)
    base = statistics.median(seconds / events for seconds, events in clock)
    policies = {"planned": PlannedPolicy(budget, LINK), "layer order": LayerOrderPolicy(), "lru": LRUPolicy(budget)}
    for name, policy in policies.items():
        steps = deciding(policy, step, options.rounds)
        found[name] = steps
    each = {
        name: 1e6 * (statistics.median(seconds / events for seconds, events in steps[2:]) - base)
        for name, steps in found.items()
    }
    figures = {
        "a plan of 400 blocks, ms": planning(400, options.rounds),
        "a plan of 5,000 blocks, ms": planning(5000, options.rounds),
        **{f"a decision, {name}, us": us for name, us in each.items()},
        "a decision beyond layer order's, us": each["planned"] - each["layer order"],
    }
    report(figures, Console(), options.json)


class Nothing:
    """Answers nothing: what is measured of it is the clock."""

    def check(self, num_layers: int) -> None:
        """Suits every model."""

    def decide(self, event: Event) -> Sequence[Action]:
        return ()


if __name__ == "__main__":
    main()

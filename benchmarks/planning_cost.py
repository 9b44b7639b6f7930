"""What policy="auto" costs: planning and deciding the host, and recording and timing the step.

    python -m benchmarks.planning_cost

Plans, choices and decisions need no device. Their times are those of the calling thread, the best of so many
rounds, as other work slows them down. Plans are made for training steps of 400 and of 5,000 blocks, within four
budgets on four links; the median of these sixteen counts, and the worst is told. The same for choices: how the
layers of such steps are treated, 33 and 200 of them. A decision is the mean over all events of a
step that goes by a plan, with the word about memory before each, beside LayerOrderPolicy's over the events that it
is told. Recording and timing are the shares by which a step of a training is longer, on the modelled clock
(benchmarks/recording_cost.py).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.report import report
from tests.policies.simulated.machine import Machine
from tests.policies.simulated.steps import Op, Step, budget_between, build, profile
from tests.policies.simulated.treated import Model
from tiered_mem.policies import Action, Event, LayerOrderPolicy, Link, LRUPolicy, PlannedPolicy, Policy
from tiered_mem.policies.planning import plan
from tiered_mem.policies.planning.choosing import choose
from tiered_mem.policies.planning.disk_and_states import StatesShare

MIB = 1 << 20
LINK = Link(50e9, 50e9)
BLOCKS_OF_A_LAYER = 12
BUDGETS = (0.75, 0.5, 0.25, 0.1)  # of the way from the least possible to all that the step takes
RATES = (53e9, 50e9, 25e9, 10e9)  # as in benchmarks.planned
NOTHING = "nothing"
CHOICES = 3  # rounds of them: each makes its steps anew
LEARNING = 2  # steps until one goes by a plan that another one has gone by


class Timed(Policy):
    """A policy, and the seconds that the calling thread took for its answers. calls: how many these were."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.follow = policy.follow
        self.seconds = 0.0
        self.calls = 0

    @property
    def asks(self) -> Collection[type[Event]]:
        return self._policy.asks

    def decide(self, event: Event) -> Sequence[Action]:
        begun = time.thread_time()
        answer = self._policy.decide(event)
        self.seconds += time.thread_time() - begun
        self.calls += 1
        return answer


def step_of(layers: int) -> Step:
    layer = [Op((2e-4, 4e-4), [8 * MIB], (8 * MIB, 8 * MIB)) for _ in range(BLOCKS_OF_A_LAYER)]
    return build([layer] * layers, [4 * MIB] * layers)


def planning(blocks: int, rounds: int) -> list[float]:
    """Milliseconds of a plan, with its passes over the profile: of each budget on each link."""
    known = profile(step_of(blocks // BLOCKS_OF_A_LAYER))
    cells = [(budget_between(known, share), Link(rate, rate)) for share in BUDGETS for rate in RATES]
    best = [float("inf")] * len(cells)
    for _ in range(rounds):
        for number, (budget, link) in enumerate(cells):
            known.__dict__.pop("moments", None)  # it is made once for a profile
            begun = time.thread_time()
            plan(known, budget, link)
            best[number] = min(best[number], time.thread_time() - begun)
    return [1e3 * seconds for seconds in best]


def choosing(layers: int, blocks: int, rounds: int) -> list[float]:
    """Milliseconds in which it is chosen how layers are treated: within each budget on each link."""
    ops = [Op((2e-4, 4e-4), [8 * MIB], (8 * MIB, 8 * MIB), dear=k % 2 == 0) for k in range(blocks // layers)]
    model = Model([ops] * layers, 4 * MIB)
    known = model.recorded().profile
    cells = [(budget_between(known, share), Link(rate, rate)) for share in BUDGETS for rate in RATES]
    best = [float("inf")] * len(cells)
    for _ in range(rounds):
        for number, (budget, link) in enumerate(cells):
            ways = model.ways  # new ones: what is known of a step is found once
            begun = time.thread_time()
            choose(ways, budget, link, StatesShare(), range(layers), now={})
            best[number] = min(best[number], time.thread_time() - begun)
    return [1e3 * seconds for seconds in best]


def deciding(policies: dict[str, Policy], step: Step, rounds: int) -> dict[str, float]:
    """Microseconds of a decision, without the clock. A policy that does nothing has to be among them."""
    timed = {name: Timed(policy) for name, policy in policies.items()}
    machines = {name: Machine(each, LINK) for name, each in timed.items()}
    best = dict.fromkeys(policies, float("inf"))
    calls: dict[str, int] = {}
    events: dict[str, int] = {}
    for number in range(rounds + LEARNING):
        for name, each in timed.items():
            each.seconds, each.calls = 0.0, 0
            gc.disable()  # the machine's garbage, not the policy's
            outcome = machines[name].run(step)
            gc.enable()
            if number >= LEARNING:
                best[name] = min(best[name], each.seconds)
                calls[name], events[name] = each.calls, len(outcome.log)
    clock = best[NOTHING] / calls[NOTHING]
    return {name: 1e6 * (best[name] - clock * calls[name]) / events[name] for name in policies}


def recording(models: Sequence[str]) -> dict[str, float]:
    """Percent by which a recorded step is longer, and a timed one, by model."""
    command = [sys.executable, "-m", "benchmarks.recording_cost", *models]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    return {f"a {kind} step, {model}, %": 100 * of[kind] for model, of in found.items() for kind in of}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planning_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=15, help="of each measurement (default: 15)")
    parser.add_argument("--models", nargs="*", default=["gpt-8", "vit-h"], help="that are recorded and timed")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    options = parser.parse_args()
    step = step_of(400 // BLOCKS_OF_A_LAYER)
    budget = budget_between(profile(step), 0.5)
    policies: dict[str, Policy] = {
        NOTHING: Nothing(),
        "planned": PlannedPolicy(budget, LINK),
        "layer order": LayerOrderPolicy(),
        "lru": LRUPolicy(budget),
    }
    each = deciding(policies, step, options.rounds)
    del each[NOTHING]
    figures = {}
    for blocks in (400, 5000):
        found = planning(blocks, options.rounds)
        figures[f"a plan of {blocks:,} blocks, ms"] = statistics.median(found)
        figures[f"a plan of {blocks:,} blocks, worst, ms"] = max(found)
    for layers, blocks in ((400 // BLOCKS_OF_A_LAYER, 400), (200, 5000)):
        found = choosing(layers, blocks, min(options.rounds, CHOICES))
        figures[f"a choice for {layers} layers, {blocks:,} blocks, ms"] = statistics.median(found)
        figures[f"a choice for {layers} layers, {blocks:,} blocks, worst, ms"] = max(found)
    figures |= {f"a decision, {name}, us": us for name, us in each.items()}
    figures["a decision beyond layer order's, us"] = each["planned"] - each["layer order"]
    figures |= recording(options.models)
    report(figures, Console(), options.json)


class Nothing(Policy):
    """Answers nothing: what is measured of it is the clock."""

    def decide(self, event: Event) -> Sequence[Action]:
        return ()


if __name__ == "__main__":
    main()

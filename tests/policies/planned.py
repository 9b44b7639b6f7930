"""Steps for PlannedPolicy, the policy for them, and the best that could be."""

from __future__ import annotations

from tests.policies.simulated.random_steps import LINK, MIB
from tests.policies.simulated.steps import (
    Op,
    Step,
    budget_between,
    build,
    profile,
)
from tiered_mem.policies import (
    PlannedPolicy,
)
from tiered_mem.policies.planning import Link, plan


def gpt(layers: int = 6, size: int = 64 * MIB, seconds: float = 2e-3) -> Step:
    """Layers of three equal blocks each."""
    layer = [Op((seconds, 2 * seconds), [size], (size, size)) for _ in range(3)]
    return build([layer] * layers, [8 * MIB] * layers)


def planned(step: Step, share: float = 0.4, link: Link = LINK) -> tuple[PlannedPolicy, int]:
    budget = budget_between(profile(step), share)
    return PlannedPolicy(budget, link, recompute=False), budget


def best(step: Step, budget: int, link: Link = LINK) -> float:
    """The seconds of a plan that is made with all knowledge."""
    return plan(profile(step), budget, link).seconds

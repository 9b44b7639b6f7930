"""Plans do not depend on how Python's `sum` adds floats: it compensates for rounding from 3.12 on."""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any

import pytest

from tests.policies.simulated.machine import Machine
from tests.policies.simulated.random_steps import KINDS
from tests.policies.simulated.steps import profile
from tiered_mem.policies import PlannedPolicy
from tiered_mem.policies.planning import Link

SLOW = Link(20e9, 20e9)
Sum = Callable[..., Any]


def rounded(values: Iterable[Any], start: Any = 0) -> Any:
    return reduce(operator.add, values, start)


def compensated(values: Iterable[Any], start: Any = 0) -> Any:
    values = [start, *values]
    return math.fsum(values) if any(isinstance(each, float) for each in values) else rounded(values)


def planned(kind: str, slowdown: float | None) -> list[object]:
    """What becomes of steps of a kind, and what is reported of them."""
    step = KINDS[kind](1)
    policy = PlannedPolicy(max(profile(step).moments.full), SLOW, slowdown=slowdown)
    machine = Machine(policy, SLOW)
    return [*(machine.run(step) for _ in range(3)), policy.report()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slowdown", [None, 0.0, 0.1])
def test_plans_are_the_same_however_floats_are_added(
    monkeypatch: pytest.MonkeyPatch, kind: str, slowdown: float | None
) -> None:
    found = []
    for add in (rounded, compensated):
        monkeypatch.setattr(builtins, "sum", add)
        found.append(planned(kind, slowdown))
        monkeypatch.undo()
    assert found[0] == found[1]

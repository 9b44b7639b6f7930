"""A step within budgets: plain, checkpointed, moving alone, and as policy="auto" treats its layers."""

from __future__ import annotations

import json

import pytest

from tests.policies.simulated.steps import budget_between
from tests.policies.simulated.treated import decoder
from tiered_mem.cli.sweep import BudgetRow, Sweep
from tiered_mem.policies.actions import How
from tiered_mem.policies.planning import Link, plan
from tiered_mem.policies.planning.disk_and_states import StatesShare
from tiered_mem.policies.planning.stitching import Ways

pytestmark = pytest.mark.once(why="it needs no device")

LINK = Link(10e9, 10e9, 1.0, 5e-6)
LAYERS = 8
MODEL = decoder(LAYERS)
PLAIN = MODEL.recorded().profile


def within(budget: int, states: StatesShare | None = None, ways: Ways | None = None) -> BudgetRow:
    (found,) = Sweep(ways or MODEL.ways, LINK, states or StatesShare()).within([budget])
    return found


def test_the_plain_step_is_there_where_it_fits() -> None:
    most = max(PLAIN.full)
    assert within(most).plain == within(most).seconds == PLAIN.compute
    assert within(most - 1).plain is None
    assert within(most, StatesShare(total=1)).plain is None


def test_a_step_is_checkpointed_as_little_as_the_budget_allows() -> None:
    budget = budget_between(PLAIN, 0.6)
    found = within(budget)
    fitting: list[tuple[float, int]] = []
    for count in range(1, LAYERS + 1):
        for some in (range(count), range(LAYERS - count, LAYERS)):
            choice: dict[int, How] = dict.fromkeys(some, "full")
            step = MODEL.recorded(choice).profile
            if max(step.full) <= budget:
                fitting.append((step.compute, count))
    assert found.checkpointed == pytest.approx(min(fitting)[0])
    assert found.checkpointed_layers == min(fitting)[1]


def test_states_have_what_checkpointing_leaves() -> None:
    budget = budget_between(PLAIN, 0.6)
    states = StatesShare(total=budget)
    found = [Sweep(MODEL.ways, LINK, states).within([budget + more])[0] for more in (0, 1 << 20)]
    assert found[0].checkpointed is not None
    assert found[1].checkpointed is not None
    assert found[0].checkpointed > (within(budget).checkpointed or 0.0)
    assert found[0].checkpointed - found[1].checkpointed == pytest.approx(LINK.exchange(1 << 20))


@pytest.mark.parametrize("share", [0.2, 0.4, 0.6, 0.8])
def test_moving_alone_and_auto_are_planned(share: float) -> None:
    budget = budget_between(PLAIN, share)
    found = within(budget)
    assert found.moving == plan(PLAIN, budget, LINK).seconds
    assert sum(found.mix.values()) <= LAYERS
    # At the last one the link hides all copies.
    assert (found.seconds < found.moving, bool(found.mix)) == (share < 0.8, share < 0.8)
    assert found.least <= found.seconds
    assert found.peak <= budget
    assert found.checkpointed is None or found.seconds <= found.checkpointed


def test_without_ways_nothing_is_computed_again() -> None:
    budget = budget_between(PLAIN, 0.3)
    found = within(budget, ways=Ways({None: MODEL.recorded()}))
    assert (found.checkpointed, found.checkpointed_layers, dict(found.mix)) == (None, None, {})
    assert found.seconds == found.moving


def test_budgets_go_from_the_least_to_what_is_enough() -> None:
    sweep = Sweep(MODEL.ways, LINK, StatesShare(total=1 << 20))
    budgets = sweep.budgets()
    rows = sweep.within({*budgets, budgets[0] - 1})
    assert [row.budget for row in rows] == budgets
    assert rows[-1].moved == 0
    assert rows[-1].states_kept == 1 << 20
    assert json.loads(json.dumps(rows[0].as_dict()))["budget"] == budgets[0]

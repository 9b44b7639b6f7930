"""A budget that is too small is an error that says what needs it, and what would help."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.policies.planned import gpt
from tests.policies.simulated.machine import Machine, backwards
from tests.policies.simulated.random_steps import LINK, MIB
from tests.policies.simulated.steps import (
    Compute,
    Op,
    Step,
    build,
)
from tiered_mem.policies import (
    PlannedPolicy,
)
from tiered_mem.policies.actions import Advice
from tiered_mem.policies.base import Event, StepEnd
from tiered_mem.policies.planning import BudgetTooSmall


def too_small(
    step: Step, budget: int, *, registered: bool = False, at_once: bool = False, step_peak: int = 0
) -> BudgetTooSmall:
    policy = PlannedPolicy(budget, LINK)
    states = policy.states
    states.registered, states.at_once, states.step_peak = registered, at_once, step_peak
    machine = Machine(policy, LINK)
    machine.allocate(300 * MIB)
    with pytest.raises(BudgetTooSmall) as caught:
        machine.run(step)
    return caught.value


def test_a_budget_below_the_floor_names_the_event_and_what_would_help() -> None:
    step = gpt()
    step.code.insert(backwards(step)[2] + 1, Compute(1e-3, 600 * MIB))
    error = too_small(step, 500 * MIB)
    assert error.floor == 916 * MIB
    assert str(error) == (
        "the budget of 500.0 MiB is below 916.0 MiB, the least that this step can be run in. In the backward of "
        "layer 3 of graph 0, 300.0 MiB are from before the step, 16.0 MiB have come in it and cannot leave, "
        "600.0 MiB come and go, and 0 B are saved and in use. What helps: smaller microbatches: 600.0 MiB are for "
        "this alone; register the optimizer, so that its states are on the host (register_optimizer); 416.0 MiB of "
        "budget more"
    )


def test_an_optimizer_that_takes_too_much_is_named() -> None:
    step = gpt()
    step.code.append(Compute(1e-3, 600 * MIB))
    assert (
        "the optimizer step, or the end of the backward, takes 900.0 MiB: register the optimizer, with small "
        "bucket_bytes, or make the microbatches smaller; 400.0 MiB of budget" in str(too_small(step, 500 * MIB))
    )


def test_an_optimizer_that_takes_less_than_the_end_of_the_backward_is_not_blamed() -> None:
    """As where a checkpoint of the user's, whose input is used first, computes the first layer again."""
    step = gpt()
    step.code.append(Compute(1e-3, 600 * MIB))
    told = str(too_small(step, 500 * MIB, registered=True, step_peak=400 * MIB))
    assert "In what the backward does after the last use of a block, 300.0 MiB are from before the step" in told
    assert "What helps: smaller microbatches: 560.0 MiB are for this alone; 400.0 MiB of budget more" in told
    told = str(too_small(step, 500 * MIB, registered=True, step_peak=900 * MIB))
    assert "the optimizer step takes 900.0 MiB" in told


@pytest.mark.parametrize(
    ("at_once", "advice"),
    [
        (False, "register the optimizer with smaller bucket_bytes"),
        (
            True,
            "register it with separable=True, if it steps each parameter by itself, and with small bucket_bytes",
        ),
    ],
)
def test_what_is_registered_is_not_advised_to_be(at_once: bool, advice: str) -> None:
    step = gpt()
    step.code.append(Compute(1e-3, 600 * MIB))
    error = too_small(step, 500 * MIB, registered=True, at_once=at_once)
    assert f"the optimizer step takes 900.0 MiB: {advice}; 400.0 MiB of budget" in str(error)
    step = gpt()
    step.code.insert(backwards(step)[2] + 1, Compute(1e-3, 600 * MIB))
    told = str(too_small(step, 500 * MIB, registered=True, at_once=at_once))
    assert "What helps: smaller microbatches: 600.0 MiB are for this alone; 416.0 MiB of budget more" in told


def test_layers_whose_saves_cannot_leave_are_to_be_checkpointed() -> None:
    """Each of eight layers saves a hundred tensors of half a megabyte beside its block."""
    layer = [Op((2e-3, 4e-3), [64 * MIB, *100 * [MIB // 2]], (64 * MIB, 64 * MIB))]
    error = too_small(build([layer] * 8, [8 * MIB] * 8), 700 * MIB)
    assert error.floor == 828 * MIB
    assert "In the forward of layer 7 of graph 0" in str(error)
    assert "What helps: checkpoint layers 4 to 6: 150.0 MiB less, or lower min_bytes; " in str(error)


@pytest.mark.parametrize("at", ["in backward", "after it"])
def test_a_policy_that_is_not_alone_says_the_same_and_goes_on(at: str) -> None:
    """Until all ranks have heard of it. What fits is planned for as ever."""
    step = gpt()
    step.code.insert(backwards(step)[2] + 1 if at == "in backward" else len(step.code), Compute(1e-3, 600 * MIB))
    alone = too_small(step, 500 * MIB)
    for budget, expected in ((500 * MIB, alone), (alone.floor, None)):
        policy = PlannedPolicy(budget, LINK)
        policy.alone = False
        machine = Machine(policy, LINK)
        machine.allocate(300 * MIB)
        machine.run(step)
        for _ in range(2):
            assert str(policy.shortfall()) == str(expected)
            assert machine.run(step).peak == alone.floor


def test_a_shortfall_is_known_before_the_step_has_ended() -> None:
    """What comes after the last event is told to it. Nothing of that stays."""
    step = gpt()
    policy = PlannedPolicy(500 * MIB, LINK)
    policy.alone = False
    machine = Machine(policy, LINK)
    found: list[BudgetTooSmall | None] = []
    hear = policy.decide

    def decide(event: Event) -> Sequence[Advice]:
        if isinstance(event, StepEnd):
            found.extend(policy.shortfall(most) for most in (0, 700 * MIB, 0))
        return hear(event)

    policy.decide = decide  # type: ignore[method-assign]
    machine.run(step)
    assert [each and each.floor for each in found] == [None, 700 * MIB, None]

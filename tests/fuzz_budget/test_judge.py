"""When a step above the budget was told of, and when a report agrees with torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.fuzz_budget.judge import ROUNDED, UNSEEN, agrees, judge, silent, tells
from tests.fuzz_budget.training import Outcome
from tests.fuzz_budget.watched import Step
from tiered_mem.activations.attachment import _NOT_SEEN
from tiered_mem.policies.planning import BudgetTooSmall

pytestmark = pytest.mark.once(why="it needs no device")

BUDGET = 100 << 20
SAID = "a step took 120.0 MiB where the budget is 100.0 MiB: 20.0 MiB of budget more would do"


def steps(*mib: int, said: int | None = None, kind: str = "plain", where: str = "training") -> list[Step]:
    """Steps that take so many MiB each. said: the number of the one in which a warning is given."""
    sizes = [n << 20 for n in mib]
    return [Step(i, kind, where, n, n, n, said=(SAID,) if i == said else ()) for i, n in enumerate(sizes)]


def numbers(found: list[Step]) -> list[int]:
    return [step.number for step in found]


def test_steps_within_the_budget_need_no_words() -> None:
    assert silent(steps(50, 100, 99), BUDGET) == []


def test_a_step_above_the_budget_in_silence_is_found() -> None:
    assert numbers(silent(steps(50, 120, 50, 101, 50), BUDGET)) == [1, 3]


def test_of_the_last_step_the_next_would_tell() -> None:
    assert silent(steps(50, 50, 120), BUDGET) == []


@pytest.mark.parametrize(("said", "found"), [(1, []), (2, []), (3, []), (0, [2]), (4, [2])])
def test_it_may_be_said_beside_the_step(said: int, found: list[int]) -> None:
    assert numbers(silent(steps(50, 50, 120, 50, 50), BUDGET)) == [2]
    assert numbers(silent(steps(50, 50, 120, 50, 50, said=said), BUDGET)) == found


def test_a_step_without_blocks_has_no_end_that_is_seen() -> None:
    first, second, third = (replace(step, blocks=False) for step in steps(120, 50, 50))
    assert numbers(silent([first, second, third], BUDGET)) == [0]
    assert silent([first, replace(second, blocks=True), third], BUDGET) == []


def test_where_no_layer_was_seen_that_is_told_of_all_steps() -> None:
    told = steps(120, 120, 120)
    told[0] = replace(told[0], said=(f"a backward has come to the layers of Model, {UNSEEN}.",))
    assert silent(told, BUDGET) == []
    assert UNSEEN in _NOT_SEEN


def test_words_without_a_size_tell_nothing() -> None:
    assert tells(SAID)
    assert not tells("this step is the 3. of its kind")


def test_once_for_a_cause_is_enough() -> None:
    assert silent(steps(120, 50, 120, 120, said=0), BUDGET) == []


def test_another_kind_of_step_is_another_cause() -> None:
    told = steps(120, 50, 120, 50, said=0)
    told[2] = replace(told[2], kind="plain evaluation x1.50")
    assert silent(told, BUDGET) == []
    told[2] = replace(told[2], kind="penalty x1.00")
    assert numbers(silent(told, BUDGET)) == [2]


def test_the_optimizer_is_one_cause_whatever_comes_before_it() -> None:
    told = steps(120, 50, 120, 50, said=0, where="optimizer")
    told[2] = replace(told[2], kind="penalty")
    assert silent(told, BUDGET) == []
    told[2] = replace(told[2], where="training")
    assert numbers(silent(told, BUDGET)) == [2]


def test_what_is_begun_anew_before_anybody_is_asked_is_not_looked_for() -> None:
    assert silent(steps(120, 50, where="evaluation"), BUDGET) == []


def test_what_torch_gives_on_top_is_forgiven() -> None:
    step, after = steps(100, 50)
    assert silent([replace(step, peak=BUDGET + ROUNDED - 1), after], BUDGET) == []
    assert silent([replace(step, peak=BUDGET + ROUNDED), after], BUDGET) != []
    assert silent([replace(step, peak=BUDGET + 512, requested=BUDGET + 1), after], BUDGET) != []


def test_an_error_with_numbers_tells_of_the_last_two_steps() -> None:
    assert numbers(silent(steps(120, 120, 120), BUDGET, ended=True)) == [0]


@pytest.mark.parametrize(("peak", "right"), [(100, True), (101, True), (102, False), (98, False)])
def test_a_report_may_differ_by_a_hundredth(peak: int, right: bool) -> None:
    assert agrees(peak << 20, steps(50, 100)) is right


def test_a_step_of_several_forwards_may_be_several_steps() -> None:
    (step,) = steps(100)
    assert not agrees(60 << 20, [step])
    assert agrees(60 << 20, [replace(step, forwards=3)])
    assert not agrees(102 << 20, [replace(step, forwards=3)])


def groups(tiered: Outcome, plain: int = 150, *, registered: bool = False) -> list[str]:
    """What is found where each step of the plain run takes so many MiB. Of the missing report nothing is told."""
    outcome = Outcome(tuple(steps(*[plain] * len(tiered.steps))), ())
    found = [finding.group for finding in judge(outcome, tiered, BUDGET, registered=registered)]
    return [group for group in found if not group.startswith("report() raises")]


def test_a_peak_that_was_begun_anew_is_found() -> None:
    hidden = [replace(step, told=step.peak - 512) for step in steps(50)]
    assert groups(Outcome(tuple(hidden), ())) == ["torch's peak is hidden"]


def test_what_is_said_in_each_step_is_found() -> None:
    talking = tuple(replace(step, said=(f"step {step.number} took 9 MiB",)) for step in steps(50, 50, 50, 50))
    assert groups(Outcome(talking, ())) == ["said again and again"]
    assert groups(Outcome(talking[:3], ())) == []


def test_numbers_are_the_same_bit_by_bit_but_for_the_bits_of_a_nan() -> None:
    nans = torch.tensor([0x7FC00000, 0x3F800000], dtype=torch.int32), torch.tensor([-0x400000, 0x3F800000]).int()
    plain, same = (Outcome(tuple(steps(50)), (each.view(torch.float32),)) for each in nans)
    zero = replace(plain, numbers=(torch.tensor([float("nan"), -0.0]),))
    for numbers, found in ((same, []), (zero, ["other numbers"]), (replace(plain, numbers=()), ["other numbers"])):
        groups = [each.group for each in judge(plain, numbers, BUDGET)]
        assert [each for each in groups if each == "other numbers"] == found


def test_errors_are_told_apart() -> None:
    small = BudgetTooSmall(BUDGET, 140 << 20, 3, 0)
    assert groups(Outcome(tuple(steps(50)), (), error=small)) == []
    assert groups(Outcome(tuple(steps(50)), (), error=small), plain=120) == [
        "a floor above what the plain run takes"
    ]
    assert groups(Outcome(tuple(steps(50)), (), error=small), plain=99) == [
        "BudgetTooSmall though the plain run fits"
    ]
    assert groups(Outcome(tuple(steps(50)), (), error=KeyError("layer"))) == ["raises KeyError"]


def test_a_step_above_the_budget_takes_no_more_than_the_plain_run() -> None:
    told = tuple(steps(120, 120, said=0))
    assert groups(Outcome(told, ()), plain=110) == []
    assert groups(Outcome(told, ()), plain=105) == ["more than the plain run takes"]


def test_advice_that_does_not_fit_is_found() -> None:
    advised = tuple(replace(step, said=("9 MiB: use register_optimizer",)) for step in steps(50))
    assert groups(Outcome(advised, ())) == []
    assert groups(Outcome(advised, ()), registered=True) == ["advises to register what is registered"]


def test_an_optimizer_that_the_manager_has_not_may_take_more_than_it_knows() -> None:
    [step] = [replace(step, where="optimizer") for step in steps(100)]
    assert not agrees(60 << 20, [step])
    assert agrees(60 << 20, [step], registered=False)
    assert not agrees(102 << 20, [step], registered=False)

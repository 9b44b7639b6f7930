"""Reports tell how layers are treated, what that saves and takes, and what the step would be otherwise."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.policies.simulated.steps import budget_between
from tests.policies.simulated.treated import decoder
from tests.policies.test_treatments import LAYERS, LINK, SETTLED, Training
from tiered_mem.policies import PlannedPolicy
from tiered_mem.policies.actions import How
from tiered_mem.policies.planning import plan
from tiered_mem.policies.planning.advice import Adviser
from tiered_mem.policies.planning.disk_and_states import StatesShare
from tiered_mem.policies.planning.report import Report
from tiered_mem.policies.planning.stitching import Ways
from tiered_mem.policies.planning.treated import Treated, Treatment, layers_counted
from tiered_mem.sizes import parse_bytes


def report(training: Training) -> Report:
    policy = training.machine.policy
    assert isinstance(policy, PlannedPolicy)
    return policy.report()


def test_each_kind_of_treatment_is_told_with_its_figures() -> None:
    model = decoder(LAYERS)
    budget = budget_between(model.recorded().profile, 0.2)
    choice: dict[int, How] = {0: "cheap", 1: "cheap", 5: "full"}
    keeps, cheap, full = Treated(model.ways, choice, budget, LINK, StatesShare()).treatments()
    assert (keeps.how, keeps.layers, keeps.less, keeps.again) == (None, (2, 3, 4, 6, 7), 0, 0.0)
    plain = model.recorded()
    expected: list[tuple[Treatment, dict[int, How]]] = [(cheap, {0: "cheap", 1: "cheap"}), (full, {5: "full"})]
    for treatment, treated in expected:
        assert dict.fromkeys(treatment.layers, treatment.how) == treated
        alone = model.recorded(treated)
        assert treatment.less == sum(plain.profile.nbytes) - sum(alone.profile.nbytes) > 0
        assert treatment.again == pytest.approx(alone.profile.compute - plain.profile.compute)
        assert treatment.again > 0


def test_what_the_step_would_be_otherwise_is_planned() -> None:
    model = decoder(LAYERS)
    budget = budget_between(model.recorded().profile, 0.5)
    choice: dict[int, How] = dict.fromkeys(range(LAYERS), "cheap")
    (cheap,) = Treated(model.ways, choice, budget, LINK, StatesShare()).treatments()
    now, otherwise = (plan(model.recorded(each).profile, budget, LINK).seconds for each in (choice, {}))
    assert cheap.why.startswith(
        f"else the step would be {1e3 * (otherwise - now):.1f} ms longer, as the link hides "
    )
    lacking = (max(model.recorded().profile.full) - budget) / 2**20
    assert cheap.why.endswith(f" of {lacking:.1f} MiB that would not fit")


def test_a_step_that_would_not_fit_is_told_as_that() -> None:
    """Where layers keep much that cannot move, unless they are computed again."""
    model = decoder(LAYERS)
    plain, cheap = model.recorded(), model.recorded(model.all("cheap"))
    most = max(cheap.profile.full)
    unmovable = list(plain.profile.unmovable)
    for k in range(plain.cuts[1], plain.cuts[-2]):
        unmovable[k] += most
    ways = Ways({None: replace(plain, profile=replace(plain.profile, unmovable=unmovable)), "cheap": cheap})
    (told,) = Treated(ways, dict.fromkeys(range(LAYERS), "cheap"), most, LINK, StatesShare()).treatments()
    assert told.why == "else the step would not fit"


def test_the_report_of_a_step_says_how_its_layers_are_treated() -> None:
    training = Training(decoder(LAYERS), 0.3)
    outcomes = [training.step() for _ in range(SETTLED + 4)]
    found = report(training)
    told = {each.how: each.layers for each in found.treatments}
    assert {layer: how for how, layers in told.items() if how for layer in layers} == training.treated[-1]
    assert sorted(layer for layers in told.values() for layer in layers) == list(range(LAYERS))
    assert found.planned == pytest.approx(outcomes[-1].seconds, rel=5e-3)
    again = sum(each.again for each in found.treatments)
    assert found.compute == pytest.approx(training.model.recorded().profile.compute + again)
    assert "no plan with its layers treated so is below" in str(found)
    assert '"cheap": ' in str(found)
    assert not found.trying
    assert json.loads(json.dumps(found.as_dict()))["treatments"][-1]["how"] in ("cheap", "full")


def test_steps_that_try_ways_are_told_of() -> None:
    training = Training(decoder(LAYERS), 0.3)
    for _ in range(4):
        training.step()
    found = report(training)
    assert found.trying
    assert found.treatments == ()
    assert "trying   steps in which layers are computed again" in str(found)
    assert "; no plan is below" in str(found)


def test_where_all_is_kept_after_all_it_is_said_why() -> None:
    training = Training(decoder(LAYERS), 0.3, can=False)
    training.settled()
    assert report(training).treatments == ()
    model = decoder(LAYERS)
    budget = budget_between(model.recorded().profile, 0.9)
    (kept,) = Treated(model.ways, {}, budget, LINK, StatesShare()).treatments()
    assert str(kept) == "8 layers (0 to 7) keep all: to compute any of them again would not make this step shorter"


def test_nothing_is_advised_to_be_computed_again_but_where_that_is_forbidden() -> None:
    on, off = (Training(decoder(LAYERS), 0.3, recompute=recompute) for recompute in (True, False))
    for training in (on, off):
        for _ in range(SETTLED):
            training.step()
    assert not any("recompute" in text for text in report(on).advice)
    assert any(text.startswith('TieringManager(recompute="auto")') for text in report(off).advice)
    assert report(off).treatments == ()
    assert not report(off).trying


def test_a_larger_budget_is_advised_as_layers_would_be_treated_there() -> None:
    """The copies are hidden already, and with more memory less is computed again."""
    training = Training(decoder(LAYERS), 0.3)
    for _ in range(SETTLED + 4):
        training.step()
    (told,) = [text for text in report(training).advice if text.startswith("a budget of ") and "save" in text]
    assert told.endswith(": all layers keep all then")
    again = sum(each.again for each in report(training).treatments)
    assert f" would save {1e3 * again:.1f} ms" in told


def test_a_smaller_budget_is_advised_only_where_the_step_is_no_longer() -> None:
    model = decoder(LAYERS)
    choice: dict[int, How] = dict.fromkeys(range(LAYERS), "cheap")
    step = model.recorded(choice)
    budget = 2 * max(step.profile.full)
    adviser = Adviser(step.profile, step.names, step.blocks, budget, LINK, ways=model.ways, choice=choice)
    (told,) = [text for text in adviser.advice() if text.endswith(" would do: nothing waits there either")]
    least = parse_bytes(told.split(" would")[0].removeprefix("a budget of ").replace(" ", ""))
    assert least < budget
    assert plan(step.profile, least + (1 << 20), LINK).seconds <= step.profile.compute * 1.005


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        ([4], "1 layer (4)"),
        (range(14, 32), "18 layers (14 to 31)"),
        ([0, 1, 2, 7], "4 layers (0 to 2, 7)"),
        ([1, 3, 5, 7], "4 layers (among 1 to 7)"),
    ],
)
def test_layers_are_counted(numbers: list[int], told: str) -> None:
    assert layers_counted(numbers) == told

"""How layers are treated is chosen as well as by trying all mixtures."""

from __future__ import annotations

import gc
import itertools
import json
import math
import weakref
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.policies.simulated.random_steps import LINK, MIB
from tests.policies.simulated.steps import Op, budget_between, build, one_forward_one_backward
from tests.policies.simulated.treated import WAYS, Model, decoder, recorded, small_model
from tiered_mem.policies.actions import How
from tiered_mem.policies.planning import BudgetTooSmall, Link, choosing, plan
from tiered_mem.policies.planning.choosing import Chosen, choose
from tiered_mem.policies.planning.disk_and_states import StatesShare
from tiered_mem.policies.planning.profile import Plan, Profile, floor
from tiered_mem.policies.planning.stitching import Ways

SLOW = Link(10e9, 10e9, 1.0, 5e-6)
OPTIMA = json.loads((Path(__file__).parent / "simulated" / "treated_optima.json").read_text())


def chosen(model: Model, budget: int, link: Link, states: StatesShare | None = None) -> Chosen:
    layers = range(len(model.layers))
    return choose(model.ways, budget, link, states or StatesShare(), layers, now={})


def seconds(model: Model, choice: dict[int, How], budget: int, link: Link) -> float:
    try:
        return plan(model.recorded(choice).profile, budget, link).seconds
    except BudgetTooSmall:
        return math.inf


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6])
@pytest.mark.parametrize("layers", [3, 5])
def test_it_is_as_good_as_all_mixtures(layers: int, share: float) -> None:
    model = decoder(layers)
    budget = budget_between(model.recorded().profile, share)
    best = min(
        seconds(model, {n: way for n, way in enumerate(ways) if way is not None}, budget, SLOW)
        for ways in itertools.product(WAYS, repeat=layers)
    )
    found = chosen(model, budget, SLOW)
    assert seconds(model, dict(found.choice), budget, SLOW) <= best * 1.003


@pytest.mark.parametrize("case", OPTIMA, ids=lambda case: f"{case['seed']}")
def test_it_is_near_to_the_optimum_of_an_integer_program(case: dict[str, float]) -> None:
    """Solved by `python -m tests.policies.simulated.treated_optima`, for each mixture."""
    model = small_model(int(case["seed"]))
    found = chosen(model, budget_between(model.recorded().profile, case["share"]), LINK)
    assert case["optimum"] * (1 - 1e-3) <= found.seconds <= case["optimum"] * 1.05


def test_most_are_solved_to_the_end() -> None:
    """The plans for the mixtures are what is left."""
    over = []
    for case in OPTIMA:
        model = small_model(int(case["seed"]))
        found = chosen(model, budget_between(model.recorded().profile, case["share"]), LINK)
        over.append(found.seconds / case["optimum"])
    assert sorted(over)[int(0.8 * len(over))] < 1.005


@pytest.mark.parametrize("share", [0.2, 0.3])
def test_many_microbatches_are_not_taken_to_move_as_an_estimate_has_it(share: float) -> None:
    """There are so many blocks that few plans are made. By the estimates more could move than plans find ways for:
    the link has nothing to do for a while after each forward."""
    dear = Op((2.1e-3, 5.3e-3), [16 * MIB] * 6, (16 * MIB, 16 * MIB))
    cheap = Op((1.1e-3, 1.1e-3), [16 * MIB] * 15, (16 * MIB, 16 * MIB), dear=False)
    model = Model([[dear, cheap, dear]] * 8, 8 * MIB)
    order = one_forward_one_backward(8, 2)
    steps = {
        way: recorded(build(model.layers, [8 * MIB] * 8, order, head=(20e-3, 0), treated=model.all(way)))
        for way in WAYS
    }
    ways, link = Ways(steps), Link(27e9, 27e9, 1.0, 5e-6)
    budget = budget_between(steps[None].profile, share)
    found = choose(ways, budget, link, StatesShare(), range(8), now={})
    firsts = [dict.fromkeys(range(count), "cheap") for count in range(0, 9, 4)]
    assert found.seconds < 1.01 * min(plan(ways.stitched(each).profile, budget, link).seconds for each in firsts)


def test_nothing_is_computed_again_where_nothing_waits() -> None:
    model = decoder(6)
    found = chosen(model, max(model.recorded().profile.full), SLOW)
    assert found.choice == {}
    assert found.seconds == found.before


def test_what_is_cheap_comes_first() -> None:
    model = decoder(8)
    found = chosen(model, budget_between(model.recorded().profile, 0.5), SLOW)
    assert set(found.choice.values()) == {"cheap"}
    assert found.seconds < 0.9 * found.before


def test_without_a_link_layers_are_computed_again() -> None:
    model = decoder(8)
    none = Link(1e6, 1e6)
    budget = budget_between(model.recorded().profile, 0.4)
    found = chosen(model, budget, none)
    assert max(model.recorded(dict(found.choice)).profile.full) <= budget
    assert found.seconds < 1.3 * model.recorded().profile.compute


@pytest.mark.parametrize("less", [1, 8, 40])
def test_a_moment_that_needs_more_than_the_budget_whatever_leaves_may_have_it(less: int) -> None:
    """Where all that was saved is there again, in the backward of the first layer."""
    model, none = Model(decoder(8).layers, 96 * MIB), Link(1e6, 1e6)
    most = floor(model.recorded(model.all("full")).profile.moments)
    ways, layers, states = model.ways, range(8), StatesShare()
    enough, little, found = (
        choose(ways, budget, none, states, layers, {}, most=most)
        for budget, most in ((most, None), (most - less * MIB, None), (most - less * MIB, most))
    )
    assert (found.choice, found.seconds) == (enough.choice, pytest.approx(enough.seconds))
    assert found.seconds < 0.01 * little.seconds


@pytest.mark.parametrize("share", [0.3, 0.4, 0.5, 0.6])
def test_many_layers_treated_in_the_cheap_way_are_found_where_few_in_the_dear_one_would_do(share: float) -> None:
    """From one of the two to the other no way leads through better ones only: it takes many layers at once."""
    model = decoder(12)
    none = Link(1e6, 1e6)
    budget = budget_between(model.recorded().profile, share)
    best = min(
        seconds(model, dict(enumerate(["full"] * full + ["cheap"] * cheap)), budget, none)
        for full, cheap in itertools.product(range(13), repeat=2)
        if full + cheap <= 12
    )
    assert chosen(model, budget, none).seconds <= best * 1.003


@pytest.mark.parametrize("share", [0.3, 0.5, 0.6])
def test_a_layer_is_treated_only_in_ways_in_which_it_was(share: float) -> None:
    """A step in which others were treated so tells nothing of it."""
    model = decoder(8)
    some = frozenset({5, 6})
    one = model.recorded(dict.fromkeys(some, "cheap"))
    ways = Ways({None: model.recorded(), "cheap": replace(one, treated=some)})
    budget = budget_between(model.recorded().profile, share)
    found = choose(ways, budget, SLOW, StatesShare(), range(8), now={})
    assert found.choice
    assert found.choice.keys() <= some
    assert found.seconds == pytest.approx(seconds(model, dict(found.choice), budget, SLOW), rel=0.01)


def test_optimizer_states_have_what_computing_again_leaves() -> None:
    """States that cross the link cost more than what layers take to be computed again."""
    model = decoder(8)
    budget = budget_between(model.recorded().profile, 0.8)
    assert chosen(model, budget, SLOW).choice == {}
    states = StatesShare(total=budget // 4)
    found = chosen(model, budget, SLOW, states)
    assert found.kept == states.total
    assert found.choice


def test_no_choice_helps_below_the_floor() -> None:
    model = decoder(4)
    with pytest.raises(BudgetTooSmall):
        chosen(model, 1 << 20, SLOW)


def test_what_does_not_fit_keeps_nothing_alive() -> None:
    """An error has the frames that it passed, and with them the tensors of a step that is under way."""
    model = decoder(4)

    class UnderWay:
        pass

    def looks() -> weakref.ref[UnderWay]:
        under_way = UnderWay()
        for budget in (1, budget_between(model.recorded().profile, 0.01)):
            with suppress(BudgetTooSmall):
                chosen(model, budget, SLOW)
        return weakref.ref(under_way)

    gc.collect()
    gc.disable()
    try:
        assert looks()() is None
    finally:
        gc.enable()


def test_another_choice_is_compared_with_the_one_that_there_is() -> None:
    model = decoder(8)
    budget = budget_between(model.recorded().profile, 0.5)
    first = chosen(model, budget, SLOW)
    again = choose(model.ways, budget, SLOW, StatesShare(), range(8), now=first.choice)
    assert again.before == pytest.approx(first.seconds)
    assert again.seconds <= again.before


def test_many_layers_are_looked_at_in_groups() -> None:
    model = decoder(100)
    budget = budget_between(model.recorded().profile, 0.3)
    found = chosen(model, budget, SLOW)
    assert found.seconds < 1.1 * model.recorded().profile.compute < found.before


@pytest.mark.parametrize(
    ("rate", "share", "best"),
    [
        (10e9, 0.1, {0: "cheap", 1: "cheap", 2: "full", 3: "cheap"}),
        (3e9, 0.5, {0: "cheap", 1: "full", 2: "cheap"}),
    ],
)
def test_where_few_plans_can_be_made_they_are_of_what_promises_the_most(
    rate: float, share: float, best: dict[int, How], monkeypatch: pytest.MonkeyPatch
) -> None:
    """best: of all 81 mixtures."""
    dear = Op((2e-3, 4e-3), [32 * MIB], (8 * MIB, 8 * MIB))
    cheap = Op((2e-4, 4e-4), [32 * MIB] * 2, (8 * MIB, 8 * MIB), dear=False)
    model = Model([[dear, cheap, dear]] * 4, 8 * MIB, one_forward_one_backward(8, 4))
    budget, link = budget_between(model.recorded().profile, share), Link(rate, rate)
    monkeypatch.setattr(choosing, "_EFFORT", 2 * choosing._ATTEMPTS * len(model.recorded().blocks))  # for one
    assert chosen(model, budget, link).seconds < seconds(model, best, budget, link) * 1.01


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_of_very_many_blocks_one_plan_is_made_and_what_there_was_is_estimated(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = []

    def counted(profile: Profile, *arguments: Any, **settings: Any) -> Plan:
        planned.append(plan(profile, *arguments, **settings))
        return planned[-1]

    monkeypatch.setattr(choosing, "plan", counted)
    model = decoder(1100)
    budget = budget_between(model.recorded().profile, share)
    found = chosen(model, budget, SLOW)
    assert len(model.recorded().profile.nbytes) > 4000
    assert [each.seconds for each in planned] == [found.seconds]
    plain = plan(model.recorded().profile, budget, SLOW, attempts=1).seconds
    assert found.seconds < 0.95 * plain
    assert found.before == pytest.approx(plain, rel=0.1)

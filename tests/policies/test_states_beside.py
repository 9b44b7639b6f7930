"""Optimizer states that cross the link in backward: what they leave of it is what activations are planned for."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from tests.policies.planned import gpt, planned
from tests.policies.simulated.machine import Machine
from tests.policies.simulated.random_steps import LINK, MIB
from tests.policies.simulated.steps import budget_between
from tests.policies.simulated.treated import WAYS, decoder
from tests.policies.test_choosing import SLOW, chosen
from tiered_mem.policies.planning import BudgetTooSmall, Link, Plan, Profile, plan
from tiered_mem.policies.planning.advice import moved
from tiered_mem.policies.planning.disk_and_states import Beside, Crossing, StatesShare, paced, states_to_keep
from tiered_mem.policies.planning.stitching import Choice

GIB = 1 << 30


def crossing(step: Profile, share: float) -> StatesShare:
    """States that take so much of the link in backward."""
    return StatesShare(backward=Crossing(others=int(share * step.in_backward * SLOW.back)))


def best_plan(step: Profile, budget: int, states: StatesShare) -> tuple[Plan, float]:
    """A plan, and the seconds with what states take."""
    beside = states.beside(SLOW, step, budget, 0)
    made = plan(step, budget, beside.link, attempts=3)
    return made, made.seconds + beside.seconds


def test_without_an_overlap_the_link_is_free_and_states_cross_it_after_backward() -> None:
    step = decoder(4).recorded().profile
    states = StatesShare(total=GIB)
    assert states.beside(SLOW, step, 1, 0) == Beside(SLOW, 0.0, SLOW.exchange(GIB))
    assert states.beside(SLOW, step, 1, GIB) == Beside(SLOW, 0.0, 0.0)


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_what_crosses_in_backward_leaves_the_rest_of_the_link_and_costs_nothing_after(share: float) -> None:
    step = decoder(4).recorded().profile
    link, late, after = crossing(step, share).beside(SLOW, step, max(step.full), 0)
    assert link.back == pytest.approx(SLOW.back * (1 - share))
    assert replace(link, back=SLOW.back) == SLOW
    assert (late, after) == (pytest.approx(0, abs=1e-9), 0.0)


def test_of_states_the_first_to_stay_are_those_that_nothing_hides() -> None:
    states = StatesShare(total=3 * GIB, backward=Crossing(sharing=GIB, others=2 * GIB))
    assert [states.crossing(kept * GIB) for kept in range(4)] == [(0, n * GIB) for n in (3, 3, 3, 2)]
    after = [states.left(SLOW, 100.0, 100.0, 0, kept * GIB).after for kept in range(4)]
    assert after == [SLOW.exchange(nbytes * GIB) for nbytes in (2, 1, 0, 0)]


def test_what_nothing_is_hidden_beside_is_late() -> None:
    crossing = Crossing(others=GIB, first=GIB // 8)
    for states in (StatesShare(backward=crossing), StatesShare(forward=crossing)):
        assert states.left(SLOW, 1.0, 1.0, 0, 0).late == pytest.approx(SLOW.exchange(GIB // 8))
        assert states.left(SLOW, 0.0, 0.0, 0, 0).late == pytest.approx(SLOW.exchange(GIB + GIB // 8))


@pytest.mark.parametrize("away", [0, 1, GIB // 8, GIB, 4 * GIB])
@pytest.mark.parametrize("others", [GIB // 8, GIB, 2 * GIB])
def test_backward_lasts_until_all_has_crossed(others: int, away: int) -> None:
    """With the waits for activations on what is left of the link, and what is late beside these: forward, too."""
    for part in ("forward", "backward"):
        states = StatesShare(**{part: Crossing(others=others)})
        link, late, after = states.left(SLOW, SLOW.exchange(GIB), SLOW.exchange(GIB), away, 0)
        left, whole = (link.back, link.out) if part == "backward" else (link.out, link.back)
        waits = max(0.0, away / left - SLOW.exchange(GIB))
        assert waits + late == pytest.approx(SLOW.exchange(max(0, others + away - GIB)), abs=1e-9)
        assert late >= 0
        assert after == 0
        assert whole == SLOW.back == SLOW.out


def test_those_of_forward_leave_less_of_the_way_out_and_those_of_backward_of_the_way_back() -> None:
    step = decoder(4).recorded().profile
    forward, backward = (int(0.25 * seconds * SLOW.back) for seconds in (step.in_forward, step.in_backward))
    states = StatesShare(forward=Crossing(others=forward), backward=Crossing(others=backward))
    link, late, after = states.beside(SLOW, step, max(step.full), 0)
    assert (link.out, link.back) == (pytest.approx(0.75 * SLOW.out), pytest.approx(0.75 * SLOW.back))
    assert (late, after) == (pytest.approx(0, abs=1e-9), 0.0)


def test_those_of_forward_stay_before_those_of_backward() -> None:
    states = StatesShare(total=3 * GIB, forward=Crossing(sharing=GIB), backward=Crossing(sharing=GIB))
    assert [states.crossing(kept * GIB) for kept in range(4)] == [(GIB, GIB), (GIB, GIB), (0, GIB), (0, 0)]


def test_with_less_of_the_link_more_is_computed_again_and_less_is_moved() -> None:
    model = decoder(8)
    step = model.recorded().profile
    budget = budget_between(step, 0.3)
    again, move = [], []
    for share in (0.0, 0.5, 0.75, 1.0):
        states = crossing(step, share)
        found = chosen(model, budget, SLOW, states)
        mixed = model.recorded(dict(found.choice)).profile
        made, seconds = best_plan(mixed, budget, states)
        assert seconds == pytest.approx(found.seconds)
        again.append(mixed.compute)
        move.append(moved(mixed, made))
    assert again == sorted(again)
    assert move == sorted(move, reverse=True)
    assert again[0] < again[-1]
    assert move[-1] < move[0] / 2


@pytest.mark.parametrize("share", [1.0, 2.0])
def test_a_link_that_is_full_of_states_is_left_alone(share: float) -> None:
    model = decoder(8)
    step = model.recorded().profile
    budget = budget_between(step, 0.7)
    states = crossing(step, share)
    found = chosen(model, budget, SLOW, states)
    mixed = model.recorded(dict(found.choice)).profile
    assert moved(mixed, best_plan(mixed, budget, states)[0]) == 0
    assert moved(step, plan(step, budget, SLOW)) > 0


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("part", [0.1, 0.3, 0.6])
def test_the_choice_is_as_good_as_all_mixtures(part: float, share: float) -> None:
    model = decoder(4)
    step = model.recorded().profile
    budget, states = budget_between(step, part), crossing(step, share)

    def seconds(choice: Choice) -> float:
        try:
            return best_plan(model.recorded(dict(choice)).profile, budget, states)[1]
        except BudgetTooSmall:
            return math.inf

    mixtures = itertools.product(WAYS, repeat=4)
    best = min(seconds({n: way for n, way in enumerate(ways) if way is not None}) for ways in mixtures)
    assert seconds(chosen(model, budget, SLOW, states).choice) <= best * 1.01


def test_states_that_backward_hides_need_not_stay() -> None:
    """In step() nothing hides them, and then they have the room of activations."""
    model = decoder(8)
    step = model.recorded().profile
    budget, total = budget_between(step, 0.8), 256 * MIB
    assert 0 < total < 0.25 * step.in_backward * SLOW.back
    without = StatesShare(total)
    overlapped = StatesShare(total, backward=Crossing(sharing=total, first=total // 256))
    assert states_to_keep(step, budget, SLOW, without)[0] > 0
    kept, seconds = states_to_keep(step, budget, SLOW, overlapped)
    assert kept == 0
    assert seconds < states_to_keep(step, budget, SLOW, without)[1]
    assert chosen(model, budget, SLOW, without).kept > 0 == chosen(model, budget, SLOW, overlapped).kept


def test_where_there_is_room_for_all_states_they_stay() -> None:
    """The first of them are waited for in backward."""
    step = decoder(8).recorded().profile
    states = StatesShare(GIB, backward=Crossing(sharing=GIB, first=GIB // 64))
    assert states_to_keep(step, max(step.full) + GIB, SLOW, states) == (GIB, step.compute)


def reload_seconds(step: Profile, made: Plan, link: Link) -> list[float]:
    """How long the queue of copies back is when each of them is begun."""
    queues, free = [], 0.0
    for b in sorted(made.reload, key=lambda b: (made.reload[b], step.used[b])):
        now = step.clock[made.reload[b]]
        queues.append(max(0.0, free - now))
        free = max(now, free) + step.nbytes[b] / link.back
    return queues


def test_reloads_beside_states_do_not_come_in_bursts() -> None:
    step = decoder(24).recorded().profile
    link = Link(100e9, 8e9)
    budget = budget_between(step, 0.7)
    made = plan(step, budget, link)
    evenly = paced(step, made, link)
    assert made.waits < 0.01 * step.compute
    assert evenly.release == made.release
    assert all(made.reload[b] <= evenly.reload[b] <= step.used[b] for b in made.reload)
    faster = replace(link, back=1.2 * link.back)
    largest = max(step.nbytes) / faster.back
    assert max(reload_seconds(step, made, faster)) > 8 * largest
    assert max(reload_seconds(step, evenly, faster)) <= 2 * largest


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_the_policy_plans_for_what_is_left_and_says_so(part: str) -> None:
    step = gpt()
    seconds, copied = [], []
    for nbytes in (0, int(0.5 * step.compute * LINK.back)):
        policy, _ = planned(step, 0.1, LINK)
        setattr(policy.states, part, Crossing(others=nbytes))
        machine = Machine(policy, LINK)
        for _ in range(10):
            outcome = machine.run(step)
        report = policy.report()
        assert report.planned is not None
        assert report.as_dict()[f"states_beside_{part}"] == nbytes
        assert (f"each way beside {part}" in str(report)) == (nbytes > 0)
        seconds.append(report.planned)
        copied.append(outcome.copied)
    assert seconds[0] < seconds[1]

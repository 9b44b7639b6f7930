"""What a plan promises: a budget that is kept whatever the times are, legal actions, and little waiting."""

from __future__ import annotations

import gc
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.policies.simulated.machine import Machine
from tests.policies.simulated.play import Played
from tests.policies.simulated.random_steps import KINDS, LINK, MIB, small_nested, small_pipeline
from tests.policies.simulated.steps import Step, budget_between, profile
from tiered_mem.policies.planning import BudgetTooSmall, Cause, Link, Plan, Profile, plan
from tiered_mem.policies.planning.disk_and_states import StatesShare, plan_disk, states_to_keep
from tiered_mem.policies.planning.planner import least_memory
from tiered_mem.policies.planning.profile import floor, least_seconds

OPTIMA = json.loads((Path(__file__).parent / "simulated" / "optima.json").read_text())
SHARES = (0.0, 0.1, 0.35, 0.7)
LINKS = (LINK, replace(LINK, back=25e9, both=0.7), Link(400e9, 400e9))


def layers(*blocks: tuple[int, float], unmovable: int = 0) -> Profile:
    """One block for each layer: its bytes, and the seconds of the layer's backward and, but for the first, forward.

    Position b is the save of block b. After them each block is used and dropped, the last one first.
    """
    n = len(blocks)
    seconds = [seconds for _, seconds in blocks[1:]] + [0.0]
    for _, each in reversed(blocks):
        seconds += [each, 0.0]
    used = [3 * n - 2 - 2 * b for b in range(n)]
    return Profile(
        seconds,
        [unmovable] * (3 * n),
        [nbytes for nbytes, _ in blocks],
        list(range(n)),
        used,
        [place + 1 for place in used],
        used,
    )


def memory(step: Profile, made: Plan) -> list[int]:
    """The bytes of the device at each position."""
    return [
        beside
        + sum(
            n
            for b, n in enumerate(step.nbytes)
            if step.saved[b] <= k < step.dropped[b]
            and not (b in made.release and made.release[b] <= k < made.reload[b])
        )
        for k, beside in enumerate(step.unmovable)
    ]


def check(step: Step, share: float, link: Link) -> None:
    known = profile(step)
    budget = budget_between(known, share)
    made = plan(known, budget, link)
    assert max(memory(known, made)) == made.peak <= budget
    assert made.release.keys() == made.reload.keys()
    for b, k in made.release.items():
        assert known.saved[b] < k < made.reload[b] <= known.used[b]
    assert made.bound * (1 - 1e-9) <= made.seconds
    assert made.seconds == pytest.approx(step.compute + sum(stall.seconds for stall in made.stalls))
    outcome = Machine(Played(known, made), link).run(step)
    assert outcome.peak == made.peak  # the machine counts by itself
    assert outcome.seconds == pytest.approx(made.seconds, rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(20))
def test_plans_keep_the_budget_and_are_legal(kind: str, seed: int) -> None:
    check(KINDS[kind](seed), SHARES[seed % len(SHARES)], LINKS[seed % len(LINKS)])


@pytest.mark.parametrize(
    ("kind", "seed", "share", "link", "seconds"),
    [
        ("encoder-decoder", 29, 0.0, 1, 0.124250454),
        ("encoder-decoder", 55, 0.1, 0, 0.062883059),
        ("pipeline", 389, 0.7, 1, 0.055347993),
    ],
    ids=["the ends of copies", "what is used later and dropped earlier", "what lives the longest"],
)
def test_plans_know_what_makes_them_good(kind: str, seed: int, share: float, link: int, seconds: float) -> None:
    """Steps that take longer where the planner does not look at that."""
    known = profile(KINDS[kind](seed))
    assert plan(known, budget_between(known, share), LINKS[link]).seconds <= seconds * 1.001


@pytest.mark.slow(why="500 random steps of each kind")
@pytest.mark.parametrize("kind", KINDS)
def test_many_plans_keep_the_budget_and_are_legal(kind: str) -> None:
    choices = itertools.cycle(itertools.product(SHARES, LINKS))
    for seed, (share, link) in zip(range(20, 520), choices, strict=False):
        check(KINDS[kind](seed), share, link)


@pytest.mark.parametrize(
    "stored", OPTIMA, ids=lambda stored: f"{stored['kind']}-{stored['seed']}-{stored['share']}"
)
def test_plans_are_near_the_optimum(stored: dict[str, float]) -> None:
    """Of steps that a solver has solved exactly: simulated/optima.py."""
    nested = stored["kind"] == "nested"
    known = profile((small_nested if nested else small_pipeline)(int(stored["seed"])))
    assert sum(known.seconds) == pytest.approx(stored["compute"]), "another step than the one that was solved"
    made = plan(known, budget_between(known, stored["share"]), LINK)
    assert made.seconds <= stored["optimum"] * (1.02 if nested else 1.1)
    assert made.seconds >= stored["optimum"] * (1 - 1e-3)


def test_what_fits_stays() -> None:
    made = plan(layers((8, 1.0), (8, 1.0), (8, 1.0)), 24, LINK)
    assert (made.release, made.reload, made.stalls) == ({}, {}, ())
    assert (made.peak, made.seconds, made.bound) == (24, 5.0, 5.0)


def test_the_block_that_is_used_last_leaves_as_late_as_its_memory_allows_and_comes_back_as_early() -> None:
    made = plan(layers((8, 1.0), (8, 1.0), (8, 1.0), (8, 1.0)), 24, Link(16.0, 16.0, latency=0.0))
    assert made.release == {0: 3}
    assert made.reload == {0: 6}  # when the last layer's block is gone
    assert made.stalls == ()


def test_a_slow_link_is_waited_for_where_memory_is_needed_and_where_the_block_is_used() -> None:
    made = plan(layers((8, 1.0), (8, 1.0), (8, 1.0)), 16, Link(2.0, 2.0, latency=0.0))
    causes = [(stall.position, stall.block, stall.cause, stall.seconds) for stall in made.stalls]
    assert causes == [(2, 0, Cause.RELEASE, 2.0), (7, 0, Cause.RELOAD, 3.0)]
    assert made.seconds == made.bound == 10.0


def test_of_one_layer_the_largest_leave_unless_the_next_is_enough() -> None:
    step = Profile([1.0] * 12, [0] * 12, [4, 12, 6, 8], [0, 1, 2, 3], [10, 8, 6, 4], [11, 9, 7, 5], [6, 6, 6, 4])
    link = Link(1e3, 1e3)
    assert [set(plan(step, budget, link).release) for budget in (24, 20, 16)] == [{2}, {0, 2}, {0, 1}]


def test_a_block_whose_copy_has_ended_is_taken_rather_than_one_that_is_used_later() -> None:
    """At position 3, where memory is short, the newest block is used last, and has only begun to leave."""
    step = Profile(
        [4.0, 4.0, 1.0, 2.0, 4.0, 0.0, 4.0, 0.0, 4.0, 0.0],
        [0, 0, 0, 8, 0, 0, 0, 0, 0, 0],
        [8, 8, 8],
        [0, 1, 2],
        [4, 6, 8],
        [5, 7, 9],
        [4, 6, 8],
    )
    made = plan(step, 24, Link(2.0, 2.0, latency=0.0))
    assert (made.release, made.reload, made.stalls) == ({1: 3}, {1: 4}, ())


def test_a_block_that_has_left_before_leaves_again_without_a_copy() -> None:
    """The second block has the bytes of the first. Each leaves a position after its save, and takes two to copy."""
    step = Profile(
        [1.0] * 10,
        [0, 0, 8, 8, 0, 0, 8, 8, 0, 0],
        [8, 8],
        [0, 5],
        [4, 8],
        [5, 9],
        [4, 8],
    )
    link = Link(4.0, 8.0, latency=0.0)
    copied, retained = (plan(replace(step, earlier=earlier), 8, link) for earlier in ((), (-1, 0)))
    assert copied.release == retained.release == {0: 2, 1: 6}
    waits = [[(stall.position, stall.cause, stall.seconds) for stall in made.stalls] for made in (copied, retained)]
    reloads = [(4, Cause.RELOAD, 1.0), (8, Cause.RELOAD, 1.0)]
    assert waits == [[reloads[0], (6, Cause.RELEASE, 1.0), reloads[1]], reloads]


def test_what_leaves_after_a_use_is_copied_before_it() -> None:
    """It takes two to copy, and its room is wanted a position after the use."""
    step = Profile(
        [1.0] * 10, [0, 0, 0, 0, 0, 0, 8, 8, 0, 0], [8, 8], [0, 5], [4, 8], [5, 9], [4, 8], earlier=(-1, 0)
    )
    link = Link(4.0, 8.0, latency=0.0)
    late, early = (plan(replace(step, earlier=earlier), 8, link) for earlier in ((), (-1, 0)))
    assert late.release == early.release == {1: 6}
    assert (late.early, early.early) == ({}, {1: 0})
    reload = (8, Cause.RELOAD, 1.0)
    waits = [[(stall.position, stall.cause, stall.seconds) for stall in made.stalls] for made in (late, early)]
    assert waits == [[(6, Cause.RELEASE, 1.0), reload], [reload]]


def test_no_copy_begins_early_where_another_is_wanted_sooner() -> None:
    """That of the last block, which has the bytes of the first, would be in front of the second's."""
    step = Profile(
        [1.0] * 13,
        [0, 0, 0, 8, 8, 8, 8, 8, 16, 0, 0, 0, 0],
        [8, 8, 8],
        [0, 1, 5],
        [4, 11, 10],
        [5, 12, 11],
        [4, 11, 10],
        earlier=(-1, -1, 0),
    )
    made = plan(step, 16, Link(4.0, 8.0, latency=0.0))
    assert (made.release, made.early, made.stalls) == ({1: 3, 2: 8}, {}, ())


def test_a_block_has_the_bytes_of_one_before_it() -> None:
    with pytest.raises(ValueError, match="saved later"):
        Profile([1.0] * 4, [0] * 4, [8], [0], [2], [3], [2], earlier=[0])


def test_blocks_that_backward_never_uses_do_not_come_back() -> None:
    step = Profile([1.0] * 4, [0] * 4, [8, 8], [0, 1], [3, 3], [3, 3], [3, 3])
    made = plan(step, 8, Link(8.0, 8.0))
    assert made.reload == {b: 3 for b in made.release} == {0: 3}


def test_blocks_that_backward_never_uses_are_not_waited_for_when_they_go() -> None:
    """The first lets go of its bytes long before the step ends, and its copy back would take longer than that."""
    step = Profile([1.0] * 8, [0] * 8, [8, 8], [0, 3], [5, 6], [5, 7], [5, 6])
    made = plan(step, 8, Link(8.0, 1.0, latency=0.0))
    assert (made.release, made.seconds, made.stalls) == ({0: 3}, 8.0, ())
    assert least_seconds(step.moments, 8, Link(8.0, 1.0)) == 8.0


@pytest.mark.parametrize("seed", range(4))
def test_blocks_that_outlive_the_step_do_not_come_back(seed: int) -> None:
    known = profile(KINDS["nested"](seed))
    end = len(known.seconds)
    outlives = [saved % 3 == 0 for saved in known.saved]
    used, dropped = (
        [end if late else place for late, place in zip(outlives, places, strict=True)]
        for places in (known.used, known.dropped)
    )
    step = replace(known, used=used, dropped=dropped)
    for share in SHARES:
        made = plan(step, budget_between(step, share), Link(5e9, 5e9))
        assert max(memory(step, made)) <= made.peak <= made.budget
        assert all(k == end for b, k in made.reload.items() if outlives[b])
        assert not any(outlives[stall.block] and stall.cause is Cause.RELOAD for stall in made.stalls)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_blocks_that_forward_still_has_are_released_when_it_lets_go(kind: str, seed: int) -> None:
    known = profile(KINDS[kind](seed))
    loose = [
        min(saved + 1 + 7 * (b % 3), used)
        for b, (saved, used) in enumerate(zip(known.saved, known.used, strict=True))
    ]
    step = replace(known, loose=loose)
    least = floor(step.moments)
    assert least >= floor(known.moments)
    full = max(step.moments.full)
    for budget in (least, (2 * least + full) // 3):
        made = plan(step, budget, LINK)
        assert max(memory(step, made)) == made.peak <= budget
        assert all(loose[b] <= k < made.reload[b] <= step.used[b] for b, k in made.release.items())
    with pytest.raises(BudgetTooSmall):
        plan(step, least - 1, LINK)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_what_is_needed_whatever_leaves_is_had_while_all_else_keeps_the_budget(kind: str, seed: int) -> None:
    known = profile(KINDS[kind](seed))
    most = floor(known.moments)
    budget = most * 31 // 32
    with pytest.raises(BudgetTooSmall):
        plan(known, budget, LINK)
    assert known.eased(budget, most - 1) is known.eased(most, 2 * most) is known
    eased = known.eased(budget, most)
    taken = memory(known, plan(eased, budget, LINK))
    assert max(taken) <= most
    same = map(int.__eq__, known.unmovable, eased.unmovable)
    others = list(itertools.compress(taken, same))
    assert 0 < len(others) < len(taken)
    assert max(others) <= budget


def test_an_empty_step() -> None:
    made = plan(Profile([], [], [], [], [], [], []), 1, LINK)
    assert (made.release, made.peak, made.seconds) == ({}, 0, 0.0)


def test_a_budget_below_the_floor_is_refused_with_figures() -> None:
    gib = 1 << 30
    step = layers((gib, 1.0), (3 * gib, 1.0), (gib, 1.0), unmovable=2 * gib)
    with pytest.raises(BudgetTooSmall) as caught:
        plan(step, 4 * gib, LINK)
    assert (caught.value.floor, caught.value.position, caught.value.unmovable) == (5 * gib, 1, 2 * gib)
    message = str(caught.value)
    for part in (
        "the budget of 4.0 GiB is below 5.0 GiB",
        "position 1",
        "2.0 GiB cannot move",
        "1.0 GiB of budget more",
    ):
        assert part in message
    assert plan(step, 5 * gib, LINK).peak == 5 * gib


def test_more_attempts_are_never_worse() -> None:
    for seed in range(15):
        known = profile(small_pipeline(seed))
        budget = budget_between(known, 0.2)
        seconds = [plan(known, budget, LINK, attempts=n).seconds for n in (1, 2, 4, 8, 16, 32)]
        assert seconds == sorted(seconds, reverse=True)


def test_less_memory_for_a_slowdown() -> None:
    known = profile(KINDS["nested"](3))
    budget = max(known.moments.full)
    whole = plan(known, budget, LINK)
    free = least_memory(known, budget, LINK, 0.0)
    slower = least_memory(known, budget, LINK, 0.2)
    assert slower.peak <= free.peak <= whole.peak == budget
    assert slower.peak < whole.peak
    assert free.seconds <= whole.seconds * (1 + 1e-9)
    assert slower.seconds <= whole.seconds * 1.2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, 1, 3])
def test_the_drive_is_planned_for_like_the_link(kind: str, seed: int) -> None:
    known = profile(KINDS[kind](seed))
    first = plan(known, budget_between(known, 0.2), LINK)
    away = sum(known.nbytes[b] for b in first.release)
    assert away > 0
    host = int(away * 0.9 / 0.875)
    made = plan_disk(known, first, host, LINK, Link(5e9, 7e9, 0.7, 1e-4))
    assert made.plan.peak <= host * 15 // 16
    for b in first.release:
        assert (
            known.saved[b]
            <= made.offload[b]
            < first.release[b]
            < first.reload[b]
            <= made.reload[b]
            <= known.used[b]
        )
    for b, k in made.spill.items():
        assert made.offload[b] < k < made.fetch[b] <= made.reload[b]
    everything = plan_disk(known, first, 2 * away, LINK, Link(5e9, 7e9))
    assert not everything.spill


@pytest.mark.usefixtures("no_gc")
def test_a_drive_that_cannot_be_planned_for_leaves_no_error_behind() -> None:
    """It would keep the frames from which it came, and all that a forward has by then."""
    known = profile(KINDS["nested"](3))
    first = plan(known, budget_between(known, 0.2), LINK)
    away = sum(known.nbytes[b] for b in first.release)
    refused = 0
    for parts in range(1, 20):
        try:
            plan_disk(known, first, away * parts // 20, LINK, Link(5e9, 7e9))
        except BudgetTooSmall:
            refused += 1
    assert refused
    assert not [each for each in gc.get_objects() if isinstance(each, BudgetTooSmall)]


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": [1.0] * 7},
        {"standing": [1]},
        {"nbytes": [1, 1, 1]},
        {"saved": [1, 0]},
        {"used": [0, 2]},
        {"dropped": [4, 9]},
    ],
)
def test_profiles_that_do_not_fit_together_are_refused(change: dict[str, Sequence[int]]) -> None:
    step = layers((8, 1.0), (8, 1.0))
    with pytest.raises(ValueError, match=r"positions|blocks|saved at"):
        replace(step, **change)


@pytest.mark.parametrize("rates", [(0, 1, 1, 0), (1, 0, 1, 0), (1, 1, 0, 0), (1, 1, 2, 0), (1, 1, 1, -1)])
def test_links_that_cannot_be_are_refused(rates: tuple[float, float, float, float]) -> None:
    with pytest.raises(ValueError, match="a link has rates above 0"):
        Link(*rates)


def test_states_stay_as_far_as_activations_do_not_miss_their_room() -> None:
    known = profile(KINDS["nested"](3))
    full = max(known.moments.full)

    def keep(budget: int, total: int) -> int:
        return states_to_keep(known, budget, LINK, StatesShare(total))[0]

    assert keep(full + 800 * MIB, 800 * MIB) == 800 * MIB
    least = floor(known.moments)
    assert keep(least, 800 * MIB) == 0
    total = full - least
    kept = [keep(budget, total) for budget in range(least, full, (full - least) // 12)]
    assert kept[0] == 0 < kept[-1]
    for budget, each in zip(range(least, full, (full - least) // 12), kept, strict=True):
        best = plan(known, budget, LINK, attempts=3).seconds + total / LINK.out
        assert plan(known, budget - each, LINK, attempts=3).seconds + (total - each) / LINK.out <= best


def test_states_leave_the_optimizers_step_its_room() -> None:
    known = profile(KINDS["nested"](3))
    full = max(known.moments.full)
    states = StatesShare(800 * MIB, step_peak=full + 300 * MIB, rounding=2 * MIB)
    kept, _ = states_to_keep(known, full + 800 * MIB, LINK, states)
    assert kept == 498 * MIB


def test_another_step_of_the_optimizer_counts_and_what_backward_takes_before_it_remains() -> None:
    """Both come after the last use of a block."""
    step = Profile([1.0] * 4, [9, 9, 30, 20], [8], [0], [2], [3], [2], standing=[5, 5, 5, 7])
    assert step.ending_below(12, before=25).unmovable == [9, 9, 30, 12]
    assert step.ending_below(12, before=30).unmovable == [9, 9, 12, 12]
    assert step.ending_below(6, before=30).unmovable == [9, 9, 6, 7]
    assert step.ending_below(40, before=30) == step

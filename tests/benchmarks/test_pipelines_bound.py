"""The bound of a pipeline's step: what it comes to where that is known, and that no plan is below it."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from benchmarks.pipelines.lower_bound import least_of_pipeline
from benchmarks.pipelines.rank_step import Act, RankStep, in_a_row
from tests.policies.simulated.random_steps import LINK, MIB, small_nested, small_pipeline
from tests.policies.simulated.steps import Layer, Op, budget_between, build, one_forward_one_backward
from tests.policies.simulated.treated import Model, recorded, small_model
from tiered_mem.policies.planning import Link, plan
from tiered_mem.policies.planning.profile import Profile
from tiered_mem.policies.planning.stitching import RecordedStep, Way

pytestmark = pytest.mark.once(why="it needs no device")

SIMULATED = Path(__file__).parents[1] / "policies" / "simulated"
AMPLE = 1 << 40
MS = 1e-3
SIZE = 64 * MIB
RATE = SIZE / MS
EVEN = Link(RATE, RATE, 1.0, 0.0)  # a block takes a millisecond
NONE = Link(1.0, 1.0)
OPTIMA = json.loads((SIMULATED / "optima.json").read_text())
TREATED = json.loads((SIMULATED / "treated_optima.json").read_text())


def layer(forward: float = 1.0) -> Layer:
    """It saves one block; the backward takes twice as many milliseconds as the forward."""
    return [Op((forward * MS, 2 * forward * MS), [SIZE])]


def rank(layers: Sequence[Layer], order: Sequence[str], stage: int = 0) -> RankStep:
    """order: as `build` has it; a graph is a microbatch."""
    return with_acts({None: recorded(build(layers, [0] * len(layers), order))}, order, stage)


def with_acts(steps: Mapping[Way, RecordedStep], order: Sequence[str], stage: int = 0) -> RankStep:
    step = steps[None]
    names, clock = step.names, step.profile.clock
    firsts = []
    for each in order:
        kind = "begin" if each[0] == "F" else "backward"
        firsts.append(next(k for k, name in enumerate(names) if name[:2] == (kind, int(each[1:]))))
    ends = [*firsts[1:], len(names)]
    return RankStep(
        [
            Act(each[0], stage, int(each[1:]), clock[a], clock[z], a)
            for each, a, z in zip(order, firsts, ends, strict=True)
        ],
        steps,
    )


def alone(steps: Mapping[Way, RecordedStep]) -> RankStep:
    """All that a rank does, as one act."""
    profile = steps[None].profile
    return RankStep([Act("F", 0, 0, 0.0, profile.compute, 0)], steps)


GPIPE = ["F0", "F1", "F2", "F3", "B0", "B1", "B2", "B3"]


@pytest.mark.parametrize(
    "order", [(GPIPE, GPIPE), (one_forward_one_backward(4, 2), one_forward_one_backward(4, 1))]
)
@pytest.mark.parametrize("message", [0.0, 0.25])
def test_with_room_for_all_it_is_the_way_through_the_schedule(
    order: tuple[list[str], list[str]], message: float
) -> None:
    ranks = [rank([layer()], own, stage) for stage, own in enumerate(order)]
    found = least_of_pipeline(ranks, [AMPLE] * 2, [EVEN] * 2, message * MS)
    hops = 2 if order[0] is GPIPE else 8  # what the ranks wait for with 1F1B
    assert found >= 15 * MS + 2 * message * MS - 1e-9
    assert found <= 15 * MS + hops * message * MS + 1e-9


@pytest.mark.parametrize(("rate", "seconds"), [(1.0, 8), (0.5, 10)])
def test_a_block_leaves_before_the_next_is_made_and_returns_when_that_is_gone(rate: float, seconds: int) -> None:
    """Forward 1, out, forward 1, backward 2, back, backward 2."""
    link = Link(rate * RATE, rate * RATE, 1.0, 0.0)
    assert least_of_pipeline([rank([layer()] * 2, ["F0", "B0"])], [SIZE], [link]) == pytest.approx(seconds * MS)


def test_directions_that_share_the_link_take_longer() -> None:
    """The first block has a millisecond to be back, in which the second one leaves."""
    ranks = [rank([layer()] * 2, ["F0", "F1", "B0", "B1"])]
    apart, shared = (least_of_pipeline(ranks, [2 * SIZE], [Link(RATE, RATE, both, 0.0)]) for both in (1.0, 0.5))
    assert apart < shared


def test_a_rank_waits_for_one_that_has_no_room() -> None:
    """The first rank takes 4 for its forward, as its first block leaves; then it has to bring that back."""
    ranks = [rank([layer()] * 2, ["F0", "B0"], stage) for stage in range(2)]
    slow = Link(RATE / 2, RATE / 2, 1.0, 0.0)
    assert least_of_pipeline(ranks, [SIZE, AMPLE], [slow] * 2) == pytest.approx(16 * MS)
    assert least_of_pipeline(ranks, [AMPLE, AMPLE], [slow] * 2) == pytest.approx(12 * MS)


def test_a_copy_hides_where_a_rank_waits_for_another() -> None:
    """What the first rank has saved leaves and returns while the second one computes."""
    ranks = [rank([layer()], ["F0", "F1", "B0", "B1"]), rank([layer(4.0)], ["F0", "B0", "F1", "B1"], 1)]
    tight, ample = (least_of_pipeline(ranks, [budget, AMPLE], [EVEN] * 2) for budget in (SIZE, AMPLE))
    assert tight == pytest.approx(ample) == pytest.approx(27 * MS)


def test_without_a_link_layers_are_computed_again() -> None:
    """Of three layers one keeps its 16 MiB alone, and takes its forward once more."""
    model = Model([layer()] * 3, 0)
    steps = {way: model.recorded(model.all(way)) for way in (None, "full")}
    found = least_of_pipeline([with_acts(steps, ["F0", "B0"])], [2 * SIZE + 16 * MIB], [NONE])
    assert found == pytest.approx(10 * MS, rel=1e-4)


def test_what_nothing_keeps_is_said() -> None:
    with pytest.raises(ValueError, match="no plan keeps the budgets"):
        least_of_pipeline([rank([layer()], ["F0", "B0"])], [SIZE - MIB], [EVEN])


@pytest.mark.parametrize("uses", [1, 2])
def test_a_block_that_leaves_twice_is_copied_once_and_returns_for_each_use(uses: int) -> None:
    """Between the two parts of a backward, as before them, another block needs its room."""
    names = [
        *[("begin", 0, 1, 0), ("forward", 0, 0, 0), ("saved", 0, 0, 0)],
        *[("begin", 1, 1, 0), ("forward", 1, 0, 0)],
        *[("backward", 0, 0, 0), ("used", (0, 0, 0), 0)],
        *[("begin", 2, 1, 0), ("forward", 2, 0, 0)],
        *[("backward", 0, 0, 1), ("used", (0, 0, 0), 1), ("dropped", (0, 0, 0), 0)],
        *[("begin", 3, 1, 0), ("forward", 3, 0, 0), ("used", (3, 0, 0), 0)],
    ]
    seconds = [0, MS, 0, 0, MS, 0, MS, 0, MS, 0, 0, 0, 0, MS, 0]
    unmovable = [0, SIZE, 0, 0, SIZE, 0, 0, 0, SIZE, 0, 0, 0, 0, SIZE, 0]
    blocks = [(0, 0, 0), (0, 0, 0, 1)]
    used = [6, 10 if uses == 2 else 11]
    profile = Profile(seconds, unmovable, [SIZE] * 2, [2, 7], used, [7, 11], [5, 9], [0] * 15, [3, 8])
    kinds = [("F", 0, 0, 3), ("F", 1, 3, 5), ("I", 0, 5, 7), ("F", 2, 7, 9), ("W", 0, 9, 12), ("F", 3, 12, 15)]
    acts = [Act(kind, 0, b, profile.clock[a], profile.clock[z], a) for kind, b, a, z in kinds]
    ranks = [
        RankStep(
            [*acts, *(Act("B", 0, n, 5 * MS, 5 * MS, 15) for n in (1, 2, 3))],
            {None: RecordedStep(names, blocks, profile)},
        )
    ]
    slow_out = Link(RATE / 4, RATE, 1.0, 0.0)
    assert least_of_pipeline(ranks, [SIZE], [slow_out]) == pytest.approx((5 + 4 + uses) * MS)


@pytest.mark.parametrize("case", OPTIMA, ids=lambda case: f"{case['kind']} {case['seed']}")
def test_it_is_not_above_the_optimum_of_one_rank(case: dict[str, float]) -> None:
    """Solved by `python -m tests.policies.simulated.optima`, for blocks that move as a whole."""
    assert of_optimum(case) <= 1 + 1e-6


@pytest.mark.parametrize("case", TREATED, ids=lambda case: f"{case['seed']}")
def test_it_is_not_above_the_optimum_of_one_rank_whose_layers_are_computed_again(case: dict[str, float]) -> None:
    assert of_treated_optimum(case) <= 1 + 1e-6


def test_it_is_near_to_most_of_them() -> None:
    assert median(map(of_optimum, OPTIMA)) > 0.97
    assert median(map(of_treated_optimum, TREATED)) > 0.97


def of_optimum(case: dict[str, float]) -> float:
    step = recorded((small_nested if case["kind"] == "nested" else small_pipeline)(int(case["seed"])))
    budget = budget_between(step.profile, case["share"])
    return least_of_pipeline([alone({None: step})], [budget], [LINK]) / case["optimum"]


def of_treated_optimum(case: dict[str, float]) -> float:
    model = small_model(int(case["seed"]))
    budget = budget_between(model.recorded().profile, case["share"])
    return least_of_pipeline([alone(model.ways.steps)], [budget], [LINK]) / case["optimum"]


@pytest.mark.parametrize("seed", range(12))
def test_plans_of_all_ranks_are_not_below_it(seed: int) -> None:
    """Each rank goes by a plan of its own. What that waits for copies it waits in any case, wherever it waits for
    other ranks too: these waits only give copies more time."""
    rng = random.Random(seed)
    stages, batches = rng.choice([2, 3, 4]), rng.choice([3, 5])
    layers = [
        [Op((t := SIZE / RATE * rng.uniform(0.2, 1.5), 2 * t), [SIZE]) for _ in range(rng.choice([1, 2, 3]))]
        for _ in range(2)
    ]
    ranks, budgets, waiting = [], [], []
    for stage in range(stages):
        order = one_forward_one_backward(batches, min(batches, stages - stage))
        ranks.append(rank(layers, order, stage))
        profile = ranks[-1].steps[None].profile
        budgets.append(budget_between(profile, rng.choice([0.2, 0.5, 0.8])))
        made = plan(profile, budgets[-1], LINK)
        late = [0.0] * len(profile.seconds)
        for stall in made.stalls:
            late[min(stall.position, len(late) - 1)] += stall.seconds
        firsts = [*(act.first for act in ranks[-1].acts), len(late)]
        waits = [sum(late[a:z]) for a, z in pairwise(firsts)]
        waiting.append([act.seconds + wait for act, wait in zip(ranks[-1].acts, waits, strict=True)])
    assert least_of_pipeline(ranks, budgets, [LINK] * stages) <= played(ranks, waiting) + 1e-9


def played(ranks: Sequence[RankStep], seconds: Sequence[Sequence[float]]) -> float:
    """When the last act ends, if each takes so many seconds."""
    ends: dict[tuple[str, int, int], float] = {}
    done = [0] * len(ranks)
    free = [0.0] * len(ranks)
    while any(n < len(each.acts) for n, each in zip(done, ranks, strict=True)):
        for r, each in enumerate(ranks):
            while done[r] < len(each.acts):
                act = each.acts[done[r]]
                other = act.stage - 1 if act.kind == "F" else act.stage + 1
                before = (act.kind, other, act.batch)
                if 0 <= other < len(ranks) and before not in ends:
                    break
                free[r] = max(free[r], ends.get(before, 0.0)) + seconds[r][done[r]]
                ends[act.kind, act.stage, act.batch] = free[r]
                done[r] += 1
    return max(free)


def test_a_rank_is_read_as_it_was_written(tmp_path: Path) -> None:
    model = small_model(0)
    before = with_acts(model.ways.steps, ["F0", "B0"])
    before.write(tmp_path / "0.json")
    after = RankStep.read(tmp_path / "0.json")
    assert (after.acts, after.steps.keys()) == (before.acts, before.steps.keys())
    for way, step in after.steps.items():
        told = before.steps[way]
        assert (step.names, step.blocks, step.treated) == (told.names, told.blocks, told.treated)
        assert step.profile.full == told.profile.full
        assert step.profile.clock == told.profile.clock


def test_acts_take_what_they_took_whatever_was_waited_for_between_them() -> None:
    """The second microbatch was waited for, before its forward and before its backward."""
    order = ["F0", "F1", "B0", "B1"]
    before = rank([layer()], order)
    step = before.steps[None]
    seconds = list(step.profile.seconds)
    acts = []
    late = 0.0
    for n, act in enumerate(before.acts):
        if n in (1, 3):
            seconds[act.first - 1] += 5 * MS
            late += 5 * MS
        acts.append(replace(act, begin=act.begin + late, end=act.end + late))
    waited = RankStep(acts, {None: replace(step, profile=replace(step.profile, seconds=seconds))})
    assert waited.steps[None].profile.compute == pytest.approx(16 * MS)
    assert least_of_pipeline([waited], [AMPLE], [EVEN]) == pytest.approx(6 * MS)
    tight = (least_of_pipeline([each], [SIZE], [EVEN]) for each in (before, waited))
    assert next(tight) == pytest.approx(next(tight))


def test_steps_in_a_row_are_one() -> None:
    """As where the manager counts each microbatch as a step."""
    one = recorded(build([layer()], [0], ["F0", "B0"]))
    both = in_a_row([(0.0, one), (4 * MS, one)])
    assert (both.profile.compute, both.profile.clock[len(one.names)]) == pytest.approx((7 * MS, 4 * MS))
    assert both.names[len(one.names)] == ("begin", 1, 1, 0)
    assert both.blocks == [(0, 0, 0), (1, 0, 0)]
    assert both.profile.full == [*one.profile.full, *one.profile.full]

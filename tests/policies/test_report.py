"""Reports on plans: where a step waits and why, and what would help. The figures follow from the steps."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.policies.planned import gpt, planned
from tests.policies.simulated.machine import Machine
from tests.policies.simulated.random_steps import LINK
from tests.policies.test_planner import layers
from tiered_mem.policies.planning import Link, Profile, plan
from tiered_mem.policies.planning.advice import Adviser, LayerStall, Stalls, checkpointed
from tiered_mem.policies.planning.disk_and_states import plan_disk
from tiered_mem.policies.planning.recording import Name
from tiered_mem.sizes import format_seconds

SECOND = Link(2.0, 2.0, latency=0.0)


def names(count: int) -> list[Name]:
    """Of the positions of `layers`, with a layer's save taken for its forward, and its use for its backward."""
    backward = [name for b in reversed(range(count)) for name in (("backward", 0, b, 0), ("dropped", (0, b, 0), 0))]
    return [*(("forward", 0, b, 0) for b in range(count)), *backward]


def blocks(count: int) -> list[Name]:
    return [(0, b, 0) for b in range(count)]


def test_a_wait_is_told_with_its_layer_and_its_cause() -> None:
    step = layers((8, 1.0), (8, 1.0), (8, 1.0))
    made = plan(step, 16, SECOND)
    told = Stalls(step, made, names(3), blocks(3), SECOND).by_layer()
    late = "waits for the reload of 8 B of layer 0: there is room for it only 1000.0 ms before its use"
    early = "the release of 8 B of layer 0 waits for its copy out: it was saved only 2000.0 ms before"
    assert told == (LayerStall(0, 0, True, 3.0, None, late), LayerStall(0, 2, False, 2.0, None, early))
    assert sum(stall.seconds for stall in told) == made.waits


def test_a_wait_behind_other_copies_names_them() -> None:
    step = layers((8, 2.0), (8, 2.0), (8, 2.0), (8, 2.0), (8, 2.0))
    made = plan(step, 16, SECOND)
    told = Stalls(step, made, names(5), blocks(5), SECOND).by_layer()
    assert made.waits > 0
    busy = [stall.why for stall in told if "the link is busy with" in stall.why]
    assert busy
    assert all(why.endswith("before it") for why in busy)


def test_measured_waits_are_set_beside_the_planned_ones() -> None:
    step = layers((8, 1.0), (8, 1.0), (8, 1.0))
    stalls = Stalls(step, plan(step, 16, SECOND), names(3), blocks(3), SECOND)
    waits = [0.0] * 9
    waits[2], waits[5] = 2.5, 0.25
    found = {(stall.layer, stall.backward): stall for stall in stalls.by_layer(waits, names(3))}
    assert [found[place].measured for place in ((2, False), (0, True), (1, True))] == [2.5, 0.0, 0.25]
    assert str(found[1, True]) == "backward of layer 1: 250.0 ms measured, not planned"
    last = {stall.layer: stall.measured for stall in stalls.by_layer([0.5, 0.0], names(3))}
    assert last[0] == 0.5  # of a step whose last two positions were measured


def test_the_report_has_the_figures_of_the_step() -> None:
    step = gpt()
    link = Link(LINK.out / 8, LINK.back / 8)
    policy, budget = planned(step, 0.1, link)
    machine = Machine(policy, link)
    assert policy.report().missing == "the first step is recorded, and the next one like it goes by a plan"
    machine.run(step)
    for _ in range(9):  # until one that is timed went by a plan
        outcome = machine.run(step)
    report = policy.report()
    assert report.step is not None
    assert report.measured == pytest.approx(outcome.seconds, rel=1e-3)
    assert report.planned == pytest.approx(outcome.seconds, rel=5e-3)
    assert report.compute == pytest.approx(step.compute)
    assert report.planned_peak <= report.budget == budget
    assert report.measured_peak is not None
    assert report.measured_peak <= budget
    assert report.moved == outcome.copied[0] == outcome.copied[1]
    assert sum(stall.seconds for stall in report.stalls) == pytest.approx(report.planned - report.compute)
    assert report.measured_hidden == pytest.approx(report.planned_hidden, abs=0.01)
    assert json.loads(json.dumps(report.as_dict()))["stalls"][0]["why"]
    assert f"step     {report.planned * 1e3:.1f} ms planned" in str(report)


def advice(step: Profile, budget: int, count: int, link: Link = SECOND, **more: Any) -> tuple[str, ...]:
    return Adviser(step, names(count), blocks(count), budget, link, **more).advice()


def test_a_larger_budget_is_told_that_hides_all_and_a_smaller_one_that_would_do() -> None:
    step = layers(*[(8, 1.0)] * 4)
    (told,) = advice(step, 24, 4)
    assert told.startswith("a budget of 32 B would hide all copies, and save ")
    assert plan(step, 32, SECOND).waits == 0
    (told,) = advice(step, 64, 4)
    assert told == "a budget of 32 B would do: nothing waits there either"


def with_ends(count: int) -> tuple[Profile, list[Name], list[Name]]:
    """Layers of two blocks, 8 and 24 bytes; each takes 0.5 s and, in backward, 1 s."""
    seconds, found, kept = [], [], []
    for layer in range(count):
        found += [("forward", 0, layer, 0), ("saved", 0, layer, 0), ("saved", 0, layer, 1), ("end", 0, layer, 0)]
        kept += [(0, layer, 0), (0, layer, 1)]
        seconds += [0.25, 0.25, 0.0, 0.0]
    saved = [4 * layer + number for layer in range(count) for number in (1, 2)]
    backward = {}
    for layer in reversed(range(count)):
        backward[layer] = len(found)
        found += [("backward", 0, layer, 0), ("dropped", (0, layer, 0), 0)]
        seconds += [1.0, 0.0]
    at = [backward[layer] for layer in range(count) for _ in range(2)]
    profile = Profile(seconds, [0] * len(found), [8, 24] * count, saved, at, [place + 1 for place in at], at)
    return profile, found, kept


def test_layers_that_are_better_computed_twice_are_named_where_that_is_forbidden() -> None:
    step, found, kept = with_ends(4)
    now = plan(step, 72, SECOND)
    told, on = (
        [text for text in Adviser(step, found, kept, 72, SECOND, recompute=on).advice() if "recompute" in text]
        for on in (False, True)
    )
    assert on == []  # it is done, where it helps
    again = checkpointed(step, found, kept, range(4))
    assert sum(again.seconds) == sum(step.seconds) + 4 * 0.5
    assert again.nbytes == [8] * 4
    assert max(again.moments.full) == 3 * 8 + 32  # the last layer's own, whose forward is not over
    after = plan(again, 72, SECOND)
    assert after.waits == 0
    less = sum(step.nbytes[b] for b in now.release)
    assert told == [
        'TieringManager(recompute="auto") chooses which layers to compute again: with layers 0 to 3 it is '
        f"{less} B less to move, and 2000.0 ms of computing in place of {format_seconds(now.waits)} of waiting"
    ]


def test_states_that_came_to_stay_are_told_where_it_pays() -> None:
    step = replace(layers(*[(8, 1.0)] * 6), unmovable=[16] * 18)
    told = advice(step, 32, 6, grown=16)
    assert any(text.startswith("the optimizer's states take 16 B of the device") for text in told)
    assert not any("optimizer" in text for text in advice(step, 32, 6))
    assert not any("optimizer" in text for text in advice(step, 64, 6, grown=16))


def test_a_drive_that_is_waited_for_is_told_with_what_it_takes() -> None:
    step = layers(*[(8, 1.0)] * 8)
    fast = Link(100.0, 100.0, latency=0.0)
    first = plan(step, 24, fast)
    disk = plan_disk(step, first, 37, fast, Link(0.5, 0.5, latency=0.0))
    assert disk.plan.waits > 0
    told = Adviser(step, names(8), blocks(8), 24, fast, disk=disk).advice()
    spilled = sum(step.nbytes[b] for b in disk.spill)
    assert any(text.startswith("the host waits") and f"to which {spilled} B go" in text for text in told)


def test_a_budget_that_is_too_small_by_now_is_the_advice() -> None:
    step = replace(layers((8, 1.0), (8, 1.0)), unmovable=[64] * 6, standing=[64] * 6)
    (told,) = advice(step, 32, 2)
    assert told.startswith("the budget of 32 B is below")

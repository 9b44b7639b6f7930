"""SynchronizationDictPolicy releases and reloads each layer at the moments of its entry."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.policies.contract import check_policy, policy_histories
from tests.policies.events import backward, begin_backward, dropped, forward, saved, state, tell
from tests.policies.pipeline import PIPELINE, PIPELINE_ENTRIES, Entries
from tiered_mem.policies import (
    Action,
    Dropped,
    Event,
    ForwardBegin,
    ForwardEnd,
    LayerBegin,
    LayerEnd,
    Offload,
    Policy,
    Release,
    Reload,
    Saved,
    SynchronizationDictPolicy,
)

GRAPH = 0
TEN_LAYERS: Entries = {
    0: (True, 5, False, 2),
    1: (True, 5, False, 2),
    5: (False, 8, False, 7),
    6: (False, 8, False, 7),
}


def steps(order: Iterable[str]) -> Iterator[tuple[str, Event]]:
    """A run of "F0", "B0", ...: layer i saves block i, which is dropped after its backward."""
    moments = list(order)
    last_forward = max(place for place, text in enumerate(moments) if text[0] == "F")
    yield "begin", ForwardBegin(GRAPH, len(moments) // 2)
    for place, text in enumerate(moments):
        layer = int(text[1:])
        yield text, LayerBegin(GRAPH, layer, backward=text[0] == "B")
        if text[0] == "B":
            yield f"end of {text}", dropped(layer)
        else:
            yield text, saved(GRAPH, layer, layer)
            yield f"end of {text}", LayerEnd(GRAPH, layer)
        if place == last_forward:
            yield "end", ForwardEnd(GRAPH)


def answers(policy: Policy, order: Iterable[str]) -> dict[str, list[Action]]:
    """What is answered at each step at which something is."""
    answered: dict[str, list[Action]] = {}
    for step, event in steps(order):
        for action in policy.decide(event):
            answered.setdefault(step, []).append(action)
    return answered


@pytest.mark.parametrize("order", [None, PIPELINE])
def test_the_pipeline_of_eight_microbatches_is_followed_step_by_step(order: list[str] | None) -> None:
    policy = SynchronizationDictPolicy(PIPELINE_ENTRIES, order=order)
    policy.check(8)
    assert answers(policy, PIPELINE) == {
        "end of F1": [Offload(1)],
        "end of F2": [Offload(2)],
        "end of F3": [Offload(3)],
        "B0": [Release(1), Release(2)],
        "F4": [Release(3), Reload(1)],
        "end of F4": [Offload(4)],
        "F5": [Release(4), Reload(2)],
        "end of F5": [Offload(5)],
        "F6": [Release(5), Reload(3)],
        "end of F6": [Offload(6)],
        "F7": [Release(6), Reload(4)],
        "B4": [Reload(5)],
        "B5": [Reload(6)],
    }


def test_ten_layers_hold_as_many_blocks_as_the_schedule_says() -> None:
    policy = SynchronizationDictPolicy(TEN_LAYERS)
    policy.check(10)
    order = [f"F{i}" for i in range(10)] + [f"B{i}" for i in reversed(range(10))]
    resident: set[int] = set()
    held: dict[str, int] = {}
    for step, event in steps(order):
        if isinstance(event, Dropped):
            resident.difference_update(event.keys)
        if step == "F5" and isinstance(event, LayerBegin):
            assert len(resident) == 5
        for action in policy.decide(event):
            match action:
                case Release(key):
                    resident.remove(key)
                case Reload(key):
                    assert key not in resident
                    resident.add(key)
        if isinstance(event, Saved):
            resident.update(key for key, _ in event.blocks)
        held[step] = len(resident)
    assert [held[f"F{i}"] for i in range(10)] == [1, 2, 3, 4, 5, 4, 5, 6, 7, 8]
    assert [held[f"B{i}"] for i in reversed(range(10))] == [8, 5, 6, 5, 4, 3, 2, 3, 2, 1]


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Entries, list[str]]:
    """A random order of the forwards and backwards of some layers, and entries that fit it."""
    num_layers = draw(st.integers(1, 8), "layers")
    order: list[str] = []
    waiting: list[int] = []
    begun = 0
    while begun < num_layers or waiting:
        if begun < num_layers and (not waiting or draw(st.booleans())):
            order.append(f"F{begun}")
            waiting.append(begun)
            begun += 1
        else:
            order.append(f"B{waiting.pop(draw(st.integers(0, len(waiting) - 1)))}")
    entries: Entries = {}
    for layer in draw(st.lists(st.integers(0, num_layers - 1), unique=True)):
        first, last = order.index(f"F{layer}") + 1, order.index(f"B{layer}")
        if first < last:
            release = draw(st.integers(first, last - 1))
            reload = draw(st.integers(release + 1, last))
            at, back = order[release], order[reload]
            entries[layer] = (at[0] == "F", int(at[1:]), back[0] == "F", int(back[1:]))
    return entries, order


@settings(deadline=None)
@given(schedules(), st.booleans())
def test_a_block_is_offloaded_released_and_reloaded_in_time(
    schedule: tuple[Entries, list[str]], order_is_told: bool
) -> None:
    entries, order = schedule
    policy = SynchronizationDictPolicy(entries, order=order if order_is_told else None)
    policy.check(len(order) // 2)
    answered = answers(policy, order)
    told: dict[Action, list[str]] = {}
    for step, actions in answered.items():
        kinds = [(Offload, Release, Reload).index(type(action)) for action in actions]
        assert kinds == sorted(kinds), f"reloads before releases at {step}: {actions}"
        for action in actions:
            told.setdefault(action, []).append(step)
    expected: dict[Action, list[str]] = {}
    for layer, (offload_fwd, offload_num, reload_fwd, reload_num) in entries.items():
        expected[Offload(layer)] = [f"end of F{layer}"]
        expected[Release(layer)] = [f"{'F' if offload_fwd else 'B'}{offload_num}"]
        expected[Reload(layer)] = [f"{'F' if reload_fwd else 'B'}{reload_num}"]
    assert told == expected
    assert (policy._graphs, policy._homes) == ({}, {})


@settings(deadline=None)
@given(schedules(), st.data())
def test_in_another_order_than_planned_every_layer_is_back_at_its_backward(
    schedule: tuple[Entries, list[str]], data: st.DataObject
) -> None:
    entries, order = schedule
    policy = SynchronizationDictPolicy(entries)
    layers = len(order) // 2
    backwards = data.draw(st.permutations(range(layers)), "backwards")
    away: set[int] = set()
    for step, event in steps([*(f"F{i}" for i in range(layers)), *(f"B{i}" for i in backwards)]):
        for action in policy.decide(event):
            if isinstance(action, Release):
                away.add(action.key)
            elif isinstance(action, Reload):
                away.discard(action.key)
        if isinstance(event, LayerBegin) and event.backward:
            assert event.layer not in away, step


def test_without_an_order_what_comes_back_together_comes_last_layer_first() -> None:
    entries: Entries = {0: (True, 3, False, 3), 1: (True, 3, False, 3)}
    plain = SynchronizationDictPolicy(entries)
    tell(plain, forward(GRAPH, 4))
    assert begin_backward(plain, GRAPH, 3) == [Reload(1), Reload(0)]


def test_with_an_order_what_comes_back_together_comes_as_it_is_needed() -> None:
    entries: Entries = {0: (True, 3, False, 3), 1: (True, 3, False, 3)}
    pipeline = SynchronizationDictPolicy(entries, order=["F0", "F1", "F2", "F3", "B3", "B0", "B1", "B2"])
    tell(pipeline, forward(GRAPH, 4))
    assert begin_backward(pipeline, GRAPH, 3) == [Reload(0), Reload(1)]


def test_a_layer_wanted_before_its_reload_comes_back_at_its_own_backward() -> None:
    policy = SynchronizationDictPolicy({0: (True, 1, False, 1), 2: (True, 3, False, 1)})
    tell(policy, forward(GRAPH, 4))
    assert begin_backward(policy, GRAPH, 2) == [Reload(2)]
    assert begin_backward(policy, GRAPH, 1) == [Reload(0)]
    assert begin_backward(policy, GRAPH, 0) == []


def test_a_reload_at_the_layers_own_backward_is_told_once() -> None:
    policy = SynchronizationDictPolicy({0: (True, 1, False, 0)})
    tell(policy, forward(GRAPH, 2))
    assert begin_backward(policy, GRAPH, 1) == []
    assert begin_backward(policy, GRAPH, 0) == [Reload(0)]


def test_a_layer_whose_backward_came_before_its_release_is_not_released() -> None:
    policy = SynchronizationDictPolicy({0: (False, 2, False, 1)})
    tell(policy, forward(GRAPH, 3))
    assert begin_backward(policy, GRAPH, 0) == [Reload(0)]
    assert begin_backward(policy, GRAPH, 2) == []
    assert begin_backward(policy, GRAPH, 1) == []


def test_a_moment_that_is_told_again_changes_nothing() -> None:
    policy = SynchronizationDictPolicy({0: (False, 3, False, 2), 1: (True, 2, False, 3)})
    tell(policy, forward(GRAPH, 4))
    assert begin_backward(policy, GRAPH, 3) == [Release(0), Reload(1)]
    assert begin_backward(policy, GRAPH, 3) == []
    assert begin_backward(policy, GRAPH, 2) == [Reload(0)]
    second = [begin_backward(policy, GRAPH, i) for i in (3, 2, 1, 0, 3)]
    assert second == [[], [], [], [], []]


def test_layers_beyond_those_that_were_told_are_scheduled_too() -> None:
    policy = SynchronizationDictPolicy(PIPELINE_ENTRIES)
    told: list[Event] = [
        ForwardBegin(GRAPH, 2) if isinstance(event, ForwardBegin) else event for _, event in steps(PIPELINE)
    ]
    assert tell(policy, told) == tell(
        SynchronizationDictPolicy(PIPELINE_ENTRIES), [event for _, event in steps(PIPELINE)]
    )


def test_layers_whose_release_never_came_are_reloaded_all_the_same() -> None:
    policy = SynchronizationDictPolicy({0: (True, 3, False, 1)})
    assert tell(policy, forward(GRAPH, 3)) == [Offload(0)]  # layer 3 was skipped
    assert tell(policy, backward(GRAPH, 3)) == [Reload(0)]


def test_graphs_in_flight_each_follow_the_schedule() -> None:
    policy = SynchronizationDictPolicy({0: (True, 2, False, 2), 1: (False, 2, False, 1)})
    tell(policy, forward(0, 3) + forward(1, 3, first_key=100))
    for graph, first in ((0, 0), (1, 100)):
        begun = [begin_backward(policy, graph, i) for i in (2, 1, 0)]
        assert begun == [[Release(first + 1), Reload(first)], [Reload(first + 1)], []]


@settings(deadline=None)
@given(policy_histories(min_layers=3))
def test_nothing_is_kept_of_what_is_over(history: list[Event]) -> None:
    entries: Entries = {0: (True, 1, False, 2), 1: (False, 2, False, 1)}
    policy = SynchronizationDictPolicy(entries)
    tell(policy, history)
    assert state(policy) == state(SynchronizationDictPolicy(entries))


@pytest.mark.parametrize(
    ("entries", "min_layers"),
    [({}, 0), ({0: (True, 1, False, 1)}, 2), (PIPELINE_ENTRIES, 8), ({0: (False, 2, True, 3)}, 4)],
)
def test_it_keeps_the_contract(entries: Entries, min_layers: int) -> None:
    check_policy(lambda: SynchronizationDictPolicy(entries), min_layers=min_layers)


def test_a_schedule_that_is_changed_later_does_not_matter() -> None:
    entries: Entries = {0: (True, 1, False, 1)}
    policy = SynchronizationDictPolicy(entries)
    entries.clear()
    assert tell(policy, forward(GRAPH, 2)) == [Offload(0), Release(0)]

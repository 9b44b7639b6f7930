from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contracts import check_policy, policy_histories
from tests.policies.events import backward, begin_backward, forward, layer_forward, tell
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

Entries = dict[int, tuple[bool, int, bool, int]]
GRAPH = 0

PIPELINE = ["F0", "F1", "F2", "F3", "B0", "F4", "B1", "F5", "B2", "F6", "B3", "F7", "B4", "B5", "B6", "B7"]
PIPELINE_ENTRIES: Entries = {
    1: (False, 0, True, 4),
    2: (False, 0, True, 5),
    3: (True, 4, True, 6),
    4: (True, 5, True, 7),
    5: (True, 6, False, 4),
    6: (True, 7, False, 5),
}
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
            yield f"end of {text}", Dropped(layer)
        else:
            yield text, Saved(GRAPH, layer, layer, nbytes=1)
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
            resident.remove(event.key)
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
            resident.add(event.key)
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
    assert vars(policy)["_saved"] == vars(SynchronizationDictPolicy({}))["_saved"]


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


def test_blocks_of_a_layer_move_in_the_order_of_its_saves() -> None:
    policy = SynchronizationDictPolicy({0: (True, 1, False, 1)})
    policy.decide(ForwardBegin(GRAPH, 2))
    assert tell(policy, layer_forward(GRAPH, 0, 7, 3, 5)) == [Offload(7), Offload(3), Offload(5)]
    assert tell(policy, layer_forward(GRAPH, 1, 8)) == [Release(7), Release(3), Release(5)]
    assert tell(policy, [ForwardEnd(GRAPH)]) == []
    assert begin_backward(policy, GRAPH, 1) == [Reload(7), Reload(3), Reload(5)]


def test_a_block_saved_by_two_layers_leaves_and_returns_with_the_later() -> None:
    policy = SynchronizationDictPolicy({0: (True, 2, False, 2), 1: (True, 3, False, 3)})
    tell(policy, [ForwardBegin(GRAPH, 4), *layer_forward(GRAPH, 0, 10, 99), *layer_forward(GRAPH, 1, 11, 99)])
    assert tell(policy, [LayerBegin(GRAPH, 2)]) == [Release(10)]
    assert tell(policy, [LayerBegin(GRAPH, 3), ForwardEnd(GRAPH)]) == [Release(11), Release(99)]
    assert begin_backward(policy, GRAPH, 3) == [Reload(11), Reload(99)]
    assert begin_backward(policy, GRAPH, 2) == [Reload(10)]


def test_a_block_that_a_kept_layer_saves_too_stays() -> None:
    policy = SynchronizationDictPolicy({0: (True, 2, False, 2)})
    tell(policy, [ForwardBegin(GRAPH, 3), *layer_forward(GRAPH, 0, 10, 99), *layer_forward(GRAPH, 1, 99)])
    assert tell(policy, [LayerBegin(GRAPH, 2), ForwardEnd(GRAPH)]) == [Release(10)]
    assert [begin_backward(policy, GRAPH, i) for i in (2, 1, 0)] == [[Reload(10)], [], []]


@pytest.mark.parametrize("later", [LayerBegin(GRAPH, 1), LayerEnd(GRAPH, 1), ForwardEnd(GRAPH)])
def test_a_block_saved_after_its_layers_end_leaves_at_the_next_event(later: Event) -> None:
    policy = SynchronizationDictPolicy({0: (True, 2, False, 2)})
    tell(policy, [ForwardBegin(GRAPH, 3), *layer_forward(GRAPH, 0, 10)])
    assert tell(policy, [Saved(GRAPH, 0, 11, nbytes=1)]) == []
    assert tell(policy, [later]) == [Offload(11)]
    assert tell(policy, [LayerEnd(GRAPH, 1)]) == []
    assert tell(policy, [LayerBegin(GRAPH, 2)]) == [Release(10), Release(11)]


@pytest.mark.parametrize("at", [LayerBegin(GRAPH, 2), LayerBegin(GRAPH, 0, backward=True)])
def test_a_block_saved_after_its_layers_end_is_offloaded_before_it_is_released(at: LayerBegin) -> None:
    policy = SynchronizationDictPolicy({1: (not at.backward, at.layer, False, 2)})
    tell(policy, [ForwardBegin(GRAPH, 3), *layer_forward(GRAPH, 0), *layer_forward(GRAPH, 1, 10)])
    tell(policy, [Saved(GRAPH, 1, 11, nbytes=1)])
    assert tell(policy, [at]) == [Offload(11), Release(10), Release(11)]


def test_a_block_saved_after_its_layers_release_is_released_as_well() -> None:
    policy = SynchronizationDictPolicy({0: (True, 1, False, 1)})
    tell(policy, [ForwardBegin(GRAPH, 2), *layer_forward(GRAPH, 0, 10), LayerBegin(GRAPH, 1)])
    tell(policy, [Saved(GRAPH, 0, 11, nbytes=1)])
    assert tell(policy, [ForwardEnd(GRAPH)]) == [Offload(11), Release(11)]
    assert begin_backward(policy, GRAPH, 1) == [Reload(10), Reload(11)]


def test_a_block_saved_just_before_its_layers_reload_stays() -> None:
    policy = SynchronizationDictPolicy({0: (True, 1, True, 2)})
    tell(policy, [ForwardBegin(GRAPH, 3), *layer_forward(GRAPH, 0, 10), LayerBegin(GRAPH, 1)])
    tell(policy, [Saved(GRAPH, 0, 11, nbytes=1)])
    assert tell(policy, [LayerBegin(GRAPH, 2), ForwardEnd(GRAPH)]) == [Reload(10), Reload(11)]


def test_a_block_saved_after_its_layers_reload_stays() -> None:
    policy = SynchronizationDictPolicy({0: (True, 1, True, 2)})
    tell(policy, [ForwardBegin(GRAPH, 3), *layer_forward(GRAPH, 0, 10)])
    assert tell(policy, [LayerBegin(GRAPH, 1), LayerBegin(GRAPH, 2)]) == [Release(10), Reload(10)]
    tell(policy, [Saved(GRAPH, 0, 11, nbytes=1)])
    assert tell(policy, [ForwardEnd(GRAPH), LayerBegin(GRAPH, 0, backward=True)]) == []


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


def test_a_block_saved_by_two_graphs_is_the_later_ones() -> None:
    policy = SynchronizationDictPolicy({0: (True, 1, False, 1)})
    tell(policy, [ForwardBegin(0, 2), *layer_forward(0, 0, 5, 99), LayerBegin(0, 1), ForwardEnd(0)])
    tell(policy, [ForwardBegin(1, 2), *layer_forward(1, 0, 6, 99), LayerBegin(1, 1), ForwardEnd(1)])
    assert begin_backward(policy, 0, 1) == [Reload(5)]
    assert begin_backward(policy, 1, 1) == [Reload(6), Reload(99)]


def test_dropped_blocks_are_not_named_again() -> None:
    policy = SynchronizationDictPolicy({0: (True, 2, False, 2)})
    tell(policy, [ForwardBegin(GRAPH, 3), *layer_forward(GRAPH, 0, 10, 11, 12), Dropped(10)])
    tell(policy, [Saved(GRAPH, 0, 13, nbytes=1), Dropped(13)])
    assert tell(policy, [LayerBegin(GRAPH, 2), Dropped(11), ForwardEnd(GRAPH)]) == [Release(11), Release(12)]
    assert begin_backward(policy, GRAPH, 2) == [Reload(12)]


@settings(deadline=None)
@given(policy_histories(min_layers=3))
def test_nothing_is_kept_of_what_is_over(history: list[Event]) -> None:
    entries: Entries = {0: (True, 1, False, 2), 1: (False, 2, False, 1)}
    policy = SynchronizationDictPolicy(entries)
    tell(policy, history)
    assert vars(policy) == vars(SynchronizationDictPolicy(entries))


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


NOT_OVER = "its own forward is not over when it is released"
RELOADED_FIRST = "it is reloaded before it is released"
RELOADED_THEN = "it is reloaded at the moment at which it is released"
RELOADED_TOO_SOON = "it is reloaded before its own forward is over"
NEEDED_FIRST = "its own backward needs it before it is reloaded"


@pytest.mark.parametrize(
    ("entry", "moments", "fault"),
    [
        ((True, 3, False, 4), ("layer 3 begins its forward", "layer 4 begins its backward"), NOT_OVER),
        ((True, 2, True, 5), ("layer 2 begins its forward", "layer 5 begins its forward"), NOT_OVER),
        ((True, 5, True, 4), ("layer 5 begins its forward", "layer 4 begins its forward"), RELOADED_FIRST),
        ((False, 5, True, 5), ("layer 5 begins its backward", "layer 5 begins its forward"), RELOADED_FIRST),
        ((True, 5, True, 5), ("layer 5 begins its forward", "layer 5 begins its forward"), RELOADED_THEN),
        ((False, 3, False, 3), ("layer 3 begins its backward", "layer 3 begins its backward"), RELOADED_THEN),
        ((False, 1, True, 2), ("layer 1 begins its backward", "layer 2 begins its forward"), RELOADED_TOO_SOON),
        ((False, 3, False, 2), ("layer 3 begins its backward", "layer 2 begins its backward"), NEEDED_FIRST),
        ((False, 3, True, 6), ("layer 3 begins its backward", "layer 6 begins its forward"), NEEDED_FIRST),
    ],
)
def test_an_entry_that_is_wrong_in_every_order_is_named(
    entry: tuple[bool, int, bool, int], moments: tuple[str, str], fault: str
) -> None:
    message = f"^layer 3 is released when {moments[0]} and reloaded when {moments[1]}, but {fault}$"
    with pytest.raises(ValueError, match=message):
        SynchronizationDictPolicy({3: entry})


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        ((False, 0, True, 3), NOT_OVER),  # B0 comes before F2
        ((False, 1, True, 3), RELOADED_FIRST),
        ((True, 3, False, 0), RELOADED_FIRST),
        ((False, 1, False, 1), RELOADED_THEN),
        ((True, 3, False, 3), NEEDED_FIRST),
        ((False, 3, False, 3), RELOADED_THEN),
        ((False, 3, False, 2), RELOADED_FIRST),
        ((False, 2, False, 3), NEEDED_FIRST),
    ],
)
def test_with_an_order_the_moments_are_compared_exactly(entry: tuple[bool, int, bool, int], fault: str) -> None:
    order = ["F0", "F1", "B0", "F2", "F3", "B1", "B2", "B3"]
    with pytest.raises(ValueError, match=rf"^layer 2 is released .*, but {fault}$"):
        SynchronizationDictPolicy({2: entry}, order=order)
    SynchronizationDictPolicy({2: (True, 3, False, 1)}, order=order)
    SynchronizationDictPolicy({2: (False, 1, False, 2)}, order=order)


@pytest.mark.parametrize(
    ("entries", "wishes"),
    [
        (
            {1: (True, 4, False, 2), 2: (True, 4, False, 1)},
            "layer 1 needs the backward of layer 2 to begin before the backward of layer 1; "
            "layer 2 needs the backward of layer 1 to begin before the backward of layer 2",
        ),
        (
            {0: (True, 5, True, 6), 1: (False, 3, False, 5), 2: (False, 1, True, 4), 4: (True, 6, False, 2)},
            "layer 1 needs the backward of layer 5 to begin before the backward of layer 1; "
            "layer 2 needs the backward of layer 1 to begin before the forward of layer 4",
        ),
        (
            {1: (False, 2, True, 4), 2: (True, 3, False, 1)},
            "layer 1 needs the backward of layer 2 to begin before the forward of layer 4; "
            "layer 1 needs the forward of layer 4 to begin before the backward of layer 1; "
            "layer 2 needs the backward of layer 1 to begin before the backward of layer 2",
        ),
    ],
)
def test_entries_that_contradict_each_other_are_named(entries: Entries, wishes: str) -> None:
    for layer, entry in entries.items():
        SynchronizationDictPolicy({layer: entry})
    with pytest.raises(ValueError, match=r"^no order of the backwards suits these entries together: ") as caught:
        SynchronizationDictPolicy(entries)
    assert sorted(str(caught.value).partition(": ")[2].split("; ")) == sorted(wishes.split("; "))


def orders(num_layers: int) -> list[list[str]]:
    """All orders in which so many layers can run forward and backward."""
    if num_layers == 0:
        return [[]]
    last = num_layers - 1
    return [
        [*shorter[:f], f"F{last}", *shorter[f:b], f"B{last}", *shorter[b:]]
        for shorter in orders(last)
        for f in range(shorter.index(f"F{last - 1}") + 1 if last else 0, len(shorter) + 1)
        for b in range(f, len(shorter) + 1)
    ]


def fits(entries: Entries, order: list[str]) -> bool:
    place = {text: i for i, text in enumerate(order)}
    return all(
        place[f"F{layer}"]
        < place[f"{'BF'[offload_fwd]}{offload_num}"]
        < place[f"{'BF'[reload_fwd]}{reload_num}"]
        <= place[f"B{layer}"]
        for layer, (offload_fwd, offload_num, reload_fwd, reload_num) in entries.items()
    )


ORDERS = orders(4)
FORMS = list(product([True, False], range(4), [True, False], range(4)))
FIT_ALONE = [(i, form) for i in range(4) for form in FORMS if any(fits({i: form}, order) for order in ORDERS)]
ENTRIES = st.one_of(
    st.dictionaries(st.integers(0, 3), st.sampled_from(FORMS), max_size=2),
    st.lists(st.sampled_from(FIT_ALONE), max_size=4).map(dict),
)


def is_accepted(entries: Entries, order: list[str] | None) -> bool:
    try:
        SynchronizationDictPolicy(entries, order=order)
    except ValueError:
        return False
    return True


@settings(deadline=None, max_examples=1000)
@given(ENTRIES)
def test_a_schedule_is_accepted_if_some_order_suits_it(entries: Entries) -> None:
    assert is_accepted(entries, None) == any(fits(entries, order) for order in ORDERS)


@settings(deadline=None)
@given(ENTRIES, st.data())
def test_with_an_order_a_schedule_is_accepted_if_that_order_suits_it(entries: Entries, data: st.DataObject) -> None:
    order = data.draw(st.sampled_from(ORDERS))
    assert is_accepted(entries, order) == fits(entries, order)


@pytest.mark.parametrize(
    "entry",
    [
        (True, 2, False),
        (True, 2, False, 1, 1),
        (1, 2, False, 1),
        (True, 2, 0, 1),
        (True, True, False, 1),
        (True, 2, False, 1.0),
        (True, "2", False, 1),
        (True, -2, False, 1),
        (True, 2, False, -1),
        None,
        "F2B1",
    ],
)
def test_an_entry_of_another_form_is_refused(entry: object) -> None:
    with pytest.raises(ValueError, match=r"^the entry of layer 1 must be \(offload_fwd, .* not ") as caught:
        SynchronizationDictPolicy({1: entry})  # type: ignore[dict-item]
    assert str(caught.value).endswith(f"not {entry!r}")


@pytest.mark.parametrize("layer", [-1, True, "0", 1.0])
def test_a_key_that_is_no_layer_is_refused(layer: object) -> None:
    with pytest.raises(ValueError, match=rf"^{layer!r} is a key of the schedule; layers are numbers from 0$"):
        SynchronizationDictPolicy({layer: (True, 2, False, 1)})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (["F0", "B"], r"^order\[1\] is 'B'; use F or B with the number of a layer, such as 'F0'$"),
        (["F0", "b0"], r"^order\[1\] is 'b0'"),
        (["F0", 0], r"^order\[1\] is 0;"),
        ("F0B0", r"^order\[0\] is 'F'"),
        (["F0", "B0", "F0"], r"^order has F0 twice$"),
        (["F0", "B0", "B0"], r"^order has B0 twice$"),
        (["F0", "F2"], r"^order has F2 where F1 is due: layers are numbered as their forwards begin$"),
        (["B0", "F0"], r"^order has B0 and no F0 before it$"),
        (["F0", "F1", "B0"], r"^order has F1 and no B1$"),
    ],
)
def test_an_order_that_is_none_is_refused(order: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SynchronizationDictPolicy({}, order=order)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ((5, (True, 6, False, 5)), "layer 5 has an entry, but {}"),
        (
            (2, (True, 5, False, 2)),
            "layer 2 is never released: it waits until layer 5 begins its forward, but {}",
        ),
        (
            (2, (True, 3, False, 6)),
            "layer 2 is never reloaded: it waits until layer 6 begins its backward, but {}",
        ),
        (
            (2, (True, 3, True, 7)),
            "layer 2 is never reloaded: it waits until layer 7 begins its forward, but {}",
        ),
    ],
)
def test_a_layer_that_does_not_exist_is_named(entry: tuple[int, tuple[bool, int, bool, int]], message: str) -> None:
    layer, moments = entry
    policy = SynchronizationDictPolicy({layer: moments})
    policy.check(8)
    has = "the model has 5 layers, counted from 0"
    with pytest.raises(ValueError, match=f"^{message.format(has)}$"):
        policy.check(5)
    order = [f"F{i}" for i in range(5)] + [f"B{i}" for i in range(5)]
    has = "order has 5 layers, counted from 0"
    with pytest.raises(ValueError, match=f"^{message.format(has)}$"):
        SynchronizationDictPolicy({layer: moments}, order=order)


def test_an_order_of_another_model_is_refused() -> None:
    policy = SynchronizationDictPolicy(PIPELINE_ENTRIES, order=PIPELINE)
    policy.check(8)
    for num_layers in (7, 9):
        with pytest.raises(ValueError, match=f"^order has 8 layers, but the model has {num_layers}$"):
            policy.check(num_layers)

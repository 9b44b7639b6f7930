from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.policies.contract import policy_histories
from tests.policies.events import backward, begin_backward, dropped, forward, layer_forward, saved, tell
from tests.policies.places import Obeyed
from tiered_mem.policies import (
    Action,
    Event,
    Fetch,
    ForwardBegin,
    ForwardEnd,
    HostPressure,
    LayerBegin,
    LayerEnd,
    LayerOrderPolicy,
    LRUPolicy,
    ManualPolicy,
    Policy,
    Release,
    Reload,
    Spill,
    SynchronizationDictPolicy,
)

GRAPH = 0
PIPELINE = ["F0", "F1", "F2", "F3", "B0", "F4", "B1", "F5", "B2", "F6", "B3", "F7", "B4", "B5", "B6", "B7"]
PIPELINE_ENTRIES = {
    1: (False, 0, True, 4),
    2: (False, 0, True, 5),
    3: (True, 4, True, 6),
    4: (True, 5, True, 7),
    5: (True, 6, False, 4),
    6: (True, 7, False, 5),
}


def after_forward(policy: Policy, num_layers: int = 6) -> Policy:
    policy = Obeyed(policy, strict=False)
    tell(policy, forward(GRAPH, num_layers))
    return policy


def spilled(policy: Policy, nbytes: int) -> list[int]:
    """The blocks that are spilled, where none of them has to be released first."""
    actions = policy.decide(HostPressure(nbytes))
    assert all(isinstance(action, Spill) for action in actions), actions
    return [action.key for action in actions]


def test_the_lowest_layers_are_spilled_first() -> None:
    assert spilled(after_forward(LayerOrderPolicy(4)), 3) == [0, 1, 2]


def test_no_more_is_spilled_than_was_asked_for() -> None:
    policy = Obeyed(LayerOrderPolicy(), strict=False)
    policy.decide(ForwardBegin(GRAPH, 3))
    for layer, nbytes in enumerate([3, 5, 2]):
        tell(policy, [LayerBegin(GRAPH, layer), saved(GRAPH, layer, layer, nbytes), LayerEnd(GRAPH, layer)])
    policy.decide(ForwardEnd(GRAPH))
    assert spilled(policy, 3) == [0]
    assert spilled(policy, 6) == [1, 2]


def test_what_is_spilled_is_not_spilled_again() -> None:
    policy = after_forward(LayerOrderPolicy(4))
    assert spilled(policy, 2) == [0, 1]
    assert spilled(policy, 100) == [2, 3]
    assert spilled(policy, 100) == []


def test_blocks_that_stay_on_the_device_are_not_spilled() -> None:
    assert spilled(after_forward(LayerOrderPolicy(2)), 100) == [0, 1]
    assert spilled(after_forward(LayerOrderPolicy(0)), 100) == []


def test_blocks_that_were_told_to_come_back_are_not_spilled() -> None:
    policy = after_forward(LayerOrderPolicy(4))
    assert begin_backward(policy, GRAPH, 5) == []
    assert begin_backward(policy, GRAPH, 4) == [Reload(3)]
    assert spilled(policy, 100) == [0, 1, 2]


def test_what_is_leaving_is_released_and_spilled_where_the_rest_is_too_little() -> None:
    policy = Obeyed(LayerOrderPolicy(4), strict=False)
    tell(policy, forward(GRAPH, 6)[:-1])  # layers 0 to 3 were released when 2 to 5 began
    assert policy.decide(HostPressure(5)) == [Spill(0), Spill(1), Spill(2), Spill(3)]

    policy = Obeyed(LayerOrderPolicy(4), strict=False)
    events = [event for i in range(4) for event in layer_forward(GRAPH, i, i)]
    tell(policy, [ForwardBegin(GRAPH, 6), *events])
    assert policy.decide(HostPressure(3)) == [Release(2), Spill(0), Spill(1), Spill(2)]
    assert policy.decide(HostPressure(3)) == [Release(3), Spill(3)]


def test_dropped_blocks_are_not_spilled() -> None:
    policy = after_forward(LayerOrderPolicy(4))
    tell(policy, [dropped(0), dropped(2)])
    assert spilled(policy, 100) == [1, 3]


@pytest.mark.parametrize(
    "policy", [LayerOrderPolicy(2), SynchronizationDictPolicy({i: (True, i + 1, False, i) for i in range(2)})]
)
def test_a_block_that_is_saved_again_is_on_the_device(policy: Policy) -> None:
    policy = after_forward(policy)
    tell(policy, [ForwardBegin(1, 6), LayerBegin(1, 0), saved(1, 0, 0)])
    assert spilled(policy, 100) == [1]


def test_of_several_graphs_the_newest_is_spilled_first_and_the_one_in_backward_last() -> None:
    policy = Obeyed(LayerOrderPolicy(2), strict=False)
    for graph in range(3):
        tell(policy, forward(graph, 4, first_key=10 * graph))
    begin_backward(policy, 2, 3)
    assert spilled(policy, 100) == [10, 11, 0, 1, 20, 21]


def test_what_is_on_disk_is_fetched_a_layer_before_its_reload() -> None:
    policy = after_forward(LayerOrderPolicy(4))
    spilled(policy, 100)
    assert [begin_backward(policy, GRAPH, i) for i in (5, 4, 3, 2, 1, 0)] == [
        [Fetch(3)],
        [Reload(3), Fetch(2)],
        [Reload(2), Fetch(1)],
        [Reload(1), Fetch(0)],
        [Reload(0)],
        [],
    ]


def test_with_all_layers_offloaded_the_layer_below_is_fetched() -> None:
    policy = after_forward(LayerOrderPolicy(in_flight=0), 3)
    spilled(policy, 100)
    assert [begin_backward(policy, GRAPH, i) for i in (2, 1, 0)] == [
        [Reload(2), Fetch(1)],
        [Reload(1), Fetch(0)],
        [Reload(0)],
    ]


def test_what_is_on_the_host_is_not_fetched() -> None:
    policy = after_forward(LayerOrderPolicy(4))
    assert spilled(policy, 2) == [0, 1]
    assert [begin_backward(policy, GRAPH, i) for i in (5, 4, 3)] == [[], [Reload(3)], [Reload(2), Fetch(1)]]


def test_what_is_fetched_is_not_spilled_again() -> None:
    policy = after_forward(LayerOrderPolicy(4))
    spilled(policy, 100)
    assert begin_backward(policy, GRAPH, 5) == [Fetch(3)]
    assert spilled(policy, 100) == []
    assert begin_backward(policy, GRAPH, 5) == []


def pipeline(order: list[str] | None) -> Policy:
    """Layers 0 to 6 ran forward and 0 to 2 backward: 4 and 5 are on the host, and 6 is leaving for it."""
    policy = Obeyed(SynchronizationDictPolicy(PIPELINE_ENTRIES, order=order), strict=False)
    events: list[Event] = [ForwardBegin(GRAPH, 8)]
    for text in PIPELINE[: PIPELINE.index("B3")]:
        layer = int(text[1:])
        if text[0] == "F":
            events += layer_forward(GRAPH, layer, layer)
        else:
            events += [LayerBegin(GRAPH, layer, backward=True), dropped(layer)]
    tell(policy, events)
    return policy


@pytest.mark.parametrize("order", [None, PIPELINE])
def test_a_schedules_layers_are_spilled_in_the_reverse_order_of_their_reloads(order: list[str] | None) -> None:
    policy = pipeline(order)
    assert policy.decide(HostPressure(1)) == [Spill(5)]
    assert policy.decide(HostPressure(1)) == [Spill(4)]
    assert policy.decide(HostPressure(1)) == [Release(6), Spill(6)]
    assert policy.decide(HostPressure(1)) == []


def test_a_schedules_layers_are_fetched_at_the_reload_before_theirs() -> None:
    policy = pipeline(PIPELINE)
    policy.decide(HostPressure(3))
    tell(policy, [LayerBegin(GRAPH, 3, backward=True), dropped(3)])
    assert tell(policy, layer_forward(GRAPH, 7)) == [Release(6), Reload(4), Fetch(5)]
    assert begin_backward(policy, GRAPH, 4) == [Reload(5), Fetch(6)]
    assert begin_backward(policy, GRAPH, 5) == [Reload(6)]


def test_without_an_order_the_backwards_are_taken_to_run_from_the_last_layer() -> None:
    policy = after_forward(SynchronizationDictPolicy({i: (True, i + 2, False, i + 1) for i in range(4)}))
    assert spilled(policy, 2) == [0, 1]
    assert spilled(policy, 2) == [2, 3]
    assert [begin_backward(policy, GRAPH, i) for i in (5, 4, 3, 2, 1)] == [
        [],
        [Reload(3), Fetch(2)],
        [Reload(2), Fetch(1)],
        [Reload(1), Fetch(0)],
        [Reload(0)],
    ]


def test_with_an_order_it_tells_which_reload_is_the_last() -> None:
    order = ["F0", "F1", "F2", "F3", "B3", "B2", "B1", "B0"]
    policy = Obeyed(
        SynchronizationDictPolicy({0: (True, 1, False, 3), 1: (True, 2, False, 2)}, order=order), strict=False
    )
    tell(policy, forward(GRAPH, 4))
    assert spilled(policy, 1) == [1]
    assert [begin_backward(policy, GRAPH, i) for i in (3, 2)] == [[Reload(0), Fetch(1)], [Reload(1)]]


def test_of_several_graphs_with_a_schedule_the_newest_is_spilled_first_and_the_one_in_backward_last() -> None:
    policy = Obeyed(SynchronizationDictPolicy({i: (True, i + 1, False, i) for i in range(2)}))
    for graph in range(3):
        tell(policy, forward(graph, 4, first_key=10 * graph))
    begin_backward(policy, 1, 3)
    assert spilled(policy, 100) == [20, 21, 0, 1, 10, 11]


def test_with_the_manual_policy_only_the_user_spills() -> None:
    policy = ManualPolicy()
    tell(policy, forward(GRAPH, 3))
    assert policy.decide(HostPressure(100)) == ()


POLICIES: list[Callable[[], Policy]] = [
    LayerOrderPolicy,
    lambda: LayerOrderPolicy(2, in_flight=1),
    lambda: SynchronizationDictPolicy({0: (True, 1, False, 2), 1: (False, 2, False, 1)}),
    lambda: LRUPolicy(6, read_ahead=3),
]


@settings(deadline=None)
@given(st.sampled_from(POLICIES), policy_histories(min_layers=3))
def test_only_what_left_the_device_is_spilled_and_only_that_is_fetched(
    make: Callable[[], Policy], history: list[Event]
) -> None:
    places = Obeyed(make(), strict=False)
    for event in history:
        on_host = places.size("host", "leaving")
        spills = [action for action in places.tell(event) if isinstance(action, Spill)]
        assert not spills or isinstance(event, HostPressure)
        if isinstance(event, HostPressure):
            sizes = [places.places.by_key[action.key].nbytes for action in spills]
            assert sum(sizes[:-1]) < event.nbytes
            assert sum(sizes) <= on_host


@pytest.mark.parametrize("make", POLICIES[:3])
def test_pressure_changes_nothing_about_reloads(make: Callable[[], Policy]) -> None:
    events = forward(GRAPH, 4) + backward(GRAPH, 4)
    pressed = [each for event in events for each in (event, HostPressure(1))]
    policy = Obeyed(make(), strict=False)
    actions = [action for action in tell(policy, pressed) if not isinstance(action, Spill | Fetch)]
    assert unique_reloads(actions) == unique_reloads(tell(Obeyed(make(), strict=False), events))


def unique_reloads(actions: list[Action]) -> list[Action]:
    return [action for action in dict.fromkeys(actions) if isinstance(action, Reload)]

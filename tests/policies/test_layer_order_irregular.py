"""LayerOrderPolicy where forwards and backwards do not go as they were told, and blocks come late or go."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.policies.events import begin_backward, dropped, forward, layer_forward, saved, state, tell
from tiered_mem.policies import (
    Action,
    Event,
    ForwardBegin,
    ForwardEnd,
    LayerBegin,
    LayerEnd,
    LayerOrderPolicy,
    Offload,
    Release,
    Reload,
    Saved,
)

GRAPH = 0


def test_a_backward_that_jumps_ahead_does_not_bring_everything_in() -> None:
    policy = LayerOrderPolicy(6)
    tell(policy, forward(GRAPH, 10))
    assert begin_backward(policy, GRAPH, 9) == []
    assert begin_backward(policy, GRAPH, 2) == [Reload(2), Reload(1), Reload(0)]  # not 5, 4 and 3
    assert begin_backward(policy, GRAPH, 1) == []


def test_a_backward_that_begins_in_the_middle_brings_in_what_is_due_there() -> None:
    policy = LayerOrderPolicy(6)
    tell(policy, forward(GRAPH, 10))
    assert begin_backward(policy, GRAPH, 4) == [Reload(4), Reload(3), Reload(2), Reload(1)]
    assert begin_backward(policy, GRAPH, 3) == [Reload(0)]


@pytest.mark.parametrize(("num_layers", "k", "in_flight"), [(10, 6, 0), (4, 4, 1), (3, 3, 0), (1, 1, 0)])
def test_a_second_backward_over_a_graph_is_scheduled_like_the_first(
    num_layers: int, k: int, in_flight: int
) -> None:
    policy = LayerOrderPolicy(k, in_flight=in_flight)
    tell(policy, forward(GRAPH, num_layers))
    first = [begin_backward(policy, GRAPH, i) for i in reversed(range(num_layers))]
    second = [begin_backward(policy, GRAPH, i) for i in reversed(range(num_layers))]
    assert sorted(action.key for actions in first for action in actions) == list(range(k))
    assert second == first


def test_skipped_layers_are_released_by_the_end_of_the_forward() -> None:
    policy = LayerOrderPolicy(3)
    run = [event for i in (0, 1, 2, 4) for event in layer_forward(GRAPH, i, i)]
    tell(policy, [ForwardBegin(GRAPH, 6), *run])  # 3 and 5, which would release 0 and 2, do not run
    assert set(tell(policy, [ForwardEnd(GRAPH)])) >= {Release(0), Release(2)}
    assert begin_backward(policy, GRAPH, 4) == [Reload(2)]
    assert begin_backward(policy, GRAPH, 2) == [Reload(1), Reload(0)]


@pytest.mark.parametrize("later", [LayerBegin(GRAPH, 1), LayerEnd(GRAPH, 1)])
def test_a_block_saved_after_its_layers_end_leaves_at_the_next_event(later: Event) -> None:
    policy = LayerOrderPolicy(1)
    tell(policy, [ForwardBegin(GRAPH, 3), *layer_forward(GRAPH, 0, 10)])
    assert tell(policy, [saved(GRAPH, 0, 11)]) == []
    assert tell(policy, [later]) == [Offload(11)]
    assert tell(policy, [LayerEnd(GRAPH, 1), LayerBegin(GRAPH, 2)]) == [Release(10), Release(11)]


@pytest.mark.parametrize("later", [LayerBegin(GRAPH, 1), ForwardEnd(GRAPH)])
def test_a_block_saved_after_its_layers_end_is_offloaded_before_it_is_released(later: Event) -> None:
    policy = LayerOrderPolicy(2, in_flight=0)
    tell(policy, [ForwardBegin(GRAPH, 2), *layer_forward(GRAPH, 0, 10), saved(GRAPH, 0, 11)])
    assert tell(policy, [later]) == [Offload(11), Release(10), Release(11)]


def test_a_block_that_a_later_layer_has_does_not_go_back_to_an_earlier_one() -> None:
    policy = LayerOrderPolicy(2)
    tell(policy, [ForwardBegin(GRAPH, 4), *layer_forward(GRAPH, 0, 10), *layer_forward(GRAPH, 1, 99)])
    tell(policy, [saved(GRAPH, 0, 99)])
    assert tell(policy, [LayerBegin(GRAPH, 2)]) == [Release(10)]
    assert tell(policy, [LayerBegin(GRAPH, 3)]) == [Release(99)]


def test_a_block_of_a_kept_layer_that_is_saved_after_its_end_stays() -> None:
    policy = LayerOrderPolicy(1)
    tell(policy, [ForwardBegin(GRAPH, 3), *layer_forward(GRAPH, 0), *layer_forward(GRAPH, 1, 11)])
    assert tell(policy, [saved(GRAPH, 1, 12), LayerBegin(GRAPH, 2), ForwardEnd(GRAPH)]) == []


@pytest.mark.parametrize("told", [0, 1, 3])
def test_with_all_layers_offloaded_those_beyond_the_told_number_are_too(told: int) -> None:
    policy = LayerOrderPolicy(in_flight=0)
    run = [ForwardBegin(GRAPH, told), *forward(GRAPH, 5)[1:]]
    assert [action for action in tell(policy, run) if isinstance(action, Offload)] == [*map(Offload, range(5))]
    assert [begin_backward(policy, GRAPH, i) for i in (4, 3, 2, 1, 0)] == [[Reload(i)] for i in (4, 3, 2, 1, 0)]


def test_of_more_layers_than_told_only_the_first_are_offloaded_and_return_by_the_true_number() -> None:
    policy = LayerOrderPolicy(2, in_flight=0)
    tell(policy, [ForwardBegin(GRAPH, 3), *layer_forward(GRAPH, 0, 0)])
    released = [tell(policy, layer_forward(GRAPH, i, i)) for i in (1, 2, 3, 4)]
    assert released == [[Release(0), Offload(1)], [Release(1)], [], []]
    tell(policy, [ForwardEnd(GRAPH)])
    assert [begin_backward(policy, GRAPH, i) for i in (4, 3, 2, 1, 0)] == [[], [Reload(1)], [Reload(0)], [], []]


def test_layers_in_flight_are_released_by_layers_beyond_the_told_number() -> None:
    policy = LayerOrderPolicy(2, in_flight=1)
    tell(policy, [ForwardBegin(GRAPH, 3), *(e for i in range(3) for e in layer_forward(GRAPH, i, i))])
    assert tell(policy, [LayerBegin(GRAPH, 3)]) == [Release(1)]


def test_a_forward_that_stops_before_the_last_layer_releases_at_its_end() -> None:
    policy = LayerOrderPolicy(3)
    tell(policy, [ForwardBegin(GRAPH, 6), *forward(GRAPH, 4)[1:-1]])
    assert tell(policy, [ForwardEnd(GRAPH)]) == [Release(0), Release(1), Release(2)]
    assert [begin_backward(policy, GRAPH, i) for i in (3, 2, 1, 0)] == [[Reload(2), Reload(1)], [Reload(0)], [], []]


@settings(deadline=None)
@given(st.data())
def test_in_any_order_of_backwards_no_layer_is_fetched_on_demand(data: st.DataObject) -> None:
    """Backwards come between forwards too, and may be told several times."""
    told = data.draw(st.integers(0, 6), "told")
    k = data.draw(st.none() | st.integers(0, told), "k")
    policy = LayerOrderPolicy(k, in_flight=data.draw(st.integers(0, 2), "in_flight"))
    policy.decide(ForwardBegin(GRAPH, told))
    resident: set[int] = set()
    waiting: list[int] = []
    layers = iter(range(data.draw(st.integers(1, 8), "layers")))
    while True:
        if waiting and data.draw(st.booleans(), "backward"):
            layer = data.draw(st.sampled_from(waiting), "layer")
            update(resident, begin_backward(policy, GRAPH, layer))
            assert layer in resident
            if data.draw(st.booleans(), "over"):
                waiting.remove(layer)
        elif (layer := next(layers, -1)) >= 0:
            for event in layer_forward(GRAPH, layer, layer):
                update(resident, policy.decide(event))
                if isinstance(event, Saved):
                    resident.add(layer)
            waiting.append(layer)
        else:
            break
    update(resident, policy.decide(ForwardEnd(GRAPH)))
    for layer in data.draw(st.permutations(waiting), "rest"):
        update(resident, begin_backward(policy, GRAPH, layer))
        assert layer in resident


def update(resident: set[int], actions: Iterable[Action]) -> None:
    for action in actions:
        match action:
            case Release(key):
                resident.discard(key)
            case Reload(key):
                resident.add(key)


def test_a_forward_that_ended_by_an_exception_releases_what_was_offloaded() -> None:
    policy = LayerOrderPolicy(3)
    tell(policy, [ForwardBegin(GRAPH, 4), *layer_forward(GRAPH, 0, 0), *layer_forward(GRAPH, 1, 1)])
    tell(policy, layer_forward(GRAPH, 2, 2)[:-1])  # raises before its LayerEnd
    assert set(tell(policy, [ForwardEnd(GRAPH)])) >= {Release(0), Release(1)}
    assert tell(policy, [dropped(1), dropped(2), dropped(0)]) == []
    assert state(policy) == state(LayerOrderPolicy(3))


@settings(deadline=None)
@given(st.permutations(range(6)), st.integers(0, 6))
def test_dropped_blocks_are_not_named_again(order: list[int], first: int) -> None:
    policy = LayerOrderPolicy(6)
    tell(policy, forward(GRAPH, 6)[:-1])
    tell(policy, [dropped(key) for key in order[:first]])
    left = set(order[first:])
    assert {action.key for action in policy.decide(ForwardEnd(GRAPH))} == left
    assert {a.key for i in reversed(range(6)) for a in begin_backward(policy, GRAPH, i)} == left
    assert tell(policy, [dropped(key) for key in order[first:]]) == []
    assert state(policy) == state(LayerOrderPolicy(6))


def test_a_block_that_was_never_told_of_can_be_dropped() -> None:
    policy = LayerOrderPolicy(1)
    assert tell(policy, [dropped(3), ForwardBegin(GRAPH, 1), dropped(4), ForwardEnd(GRAPH)]) == []


def test_a_graph_whose_blocks_are_gone_may_save_more() -> None:
    """Its backward does, with create_graph=True."""
    policy = LayerOrderPolicy(1)
    tell(policy, [*forward(GRAPH, 1), dropped(0)])
    assert tell(policy, [saved(GRAPH, 0, 7), dropped(7)]) == []
    assert state(policy) == state(LayerOrderPolicy(1))

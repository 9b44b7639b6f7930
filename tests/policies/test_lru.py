from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.policies.contract import check_policy, policy_histories
from tests.policies.events import backward, begin_backward, dropped, forward, saved, state, tell
from tests.policies.places import Obeyed
from tiered_mem.policies import (
    Event,
    Fetch,
    ForwardBegin,
    ForwardEnd,
    HostPressure,
    LayerBegin,
    LayerEnd,
    LRUPolicy,
    Offload,
    Release,
    Reload,
    Spill,
)

GRAPH = 0


def saves(*sizes: int, graph: int = GRAPH, first_key: int = 0) -> list[Event]:
    """Layer i saves one block, `first_key` + i, of the i-th size."""
    return [
        event
        for i, nbytes in enumerate(sizes)
        for event in (LayerBegin(graph, i), saved(graph, i, first_key + i, nbytes), LayerEnd(graph, i))
    ]


def test_what_fits_into_half_of_the_budget_stays() -> None:
    policy = LRUPolicy(16)
    assert tell(policy, [ForwardBegin(GRAPH, 8), *saves(*[1] * 8), ForwardEnd(GRAPH)]) == []
    assert tell(policy, backward(GRAPH, 8)) == []


def test_above_half_of_the_budget_the_oldest_begin_to_leave_until_three_eighths_are_left() -> None:
    policy = LRUPolicy(16)
    tell(policy, saves(*[1] * 8))
    assert tell(policy, [saved(GRAPH, 8, 8)]) == [Offload(0), Offload(1), Offload(2)]
    assert tell(policy, [saved(GRAPH, 9, 9), saved(GRAPH, 10, 10)]) == []


def test_what_is_leaving_is_released_only_where_the_budget_would_be_passed() -> None:
    policy = LRUPolicy(16)
    assert not [action for action in tell(policy, saves(*[1] * 16)) if isinstance(action, Release)]
    assert tell(policy, [saved(GRAPH, 16, 16)]) == [Release(0)]
    assert tell(policy, [saved(GRAPH, 17, 17)]) == [Offload(9), Offload(10), Offload(11), Release(1)]


def test_a_block_that_is_saved_again_is_used_again() -> None:
    policy = LRUPolicy(16)
    tell(policy, saves(*[1] * 8))
    tell(policy, [saved(GRAPH, 8, 0)])
    assert tell(policy, [saved(GRAPH, 9, 9)]) == [Offload(1), Offload(2), Offload(3)]


def test_a_block_that_is_saved_again_while_it_leaves_stays() -> None:
    policy = LRUPolicy(8)
    tell(policy, saves(*[1] * 5))  # 0 and 1 are leaving
    tell(policy, [saved(GRAPH, 5, 0)])
    released = [action for action in tell(policy, saves(*[1] * 5, first_key=10)) if isinstance(action, Release)]
    assert released == [Release(1), Release(2)]


def test_a_block_of_two_layers_is_back_for_the_later() -> None:
    places = Obeyed(LRUPolicy(8, read_ahead=1))
    places.tell(saved(GRAPH, 3, 0), saved(GRAPH, 1, 0))
    places.tell(*saves(*[1] * 20, graph=1, first_key=100))
    assert places.tell(LayerBegin(GRAPH, 2, backward=True)) == []
    assert places.tell(LayerBegin(GRAPH, 3, backward=True))[-1] == Reload(0)


def test_a_block_of_two_graphs_is_the_later_ones() -> None:
    places = Obeyed(LRUPolicy(8, read_ahead=1))
    places.tell(saved(0, 3, 0), saved(1, 1, 0))
    places.tell(*saves(*[1] * 20, graph=2, first_key=100))
    assert places.tell(LayerBegin(0, 3, backward=True)) == []
    assert places.tell(LayerBegin(1, 1, backward=True))[-1] == Reload(0)


def test_a_block_larger_than_the_budget_leaves_at_once_and_alone() -> None:
    policy = LRUPolicy(16)
    assert tell(policy, saves(4, 17)) == [Offload(1), Release(1)]
    assert tell(policy, [ForwardEnd(GRAPH), *backward(GRAPH, 2)]) == []  # backward asks for it itself


def test_a_block_larger_than_the_budget_does_not_hold_up_others() -> None:
    policy = LRUPolicy(8, read_ahead=4)
    tell(policy, saves(2, 2, 9, 4, 4))
    assert tell(policy, [HostPressure(100)])[-4:] == [Spill(2), Spill(0), Spill(1), Spill(3)]
    assert begin_backward(policy, GRAPH, 4) == [Reload(3), Fetch(2), Fetch(1), Fetch(0)]
    assert begin_backward(policy, GRAPH, 3) == []
    assert tell(policy, [dropped(3)]) == [Reload(1), Reload(0)]


def test_blocks_come_back_in_the_reverse_order_as_many_bytes_as_are_read_ahead() -> None:
    places = Obeyed(LRUPolicy(16, read_ahead=3))
    places.tell(*saves(*[1] * 30))
    away = sorted(places.keys("leaving", "host"))
    assert away == list(range(24))
    assert places.tell(LayerBegin(GRAPH, 29, backward=True)) == [Reload(23), Reload(22), Reload(21)]
    for layer in range(29, 23, -1):
        assert places.tell(LayerBegin(GRAPH, layer, backward=True), dropped(layer)) == []
    assert places.tell(LayerBegin(GRAPH, 23, backward=True)) == []
    assert places.tell(dropped(23)) == [Reload(20)]
    assert places.tell(LayerBegin(GRAPH, 21, backward=True), dropped(22), dropped(21)) == [Reload(19), Reload(18)]


def test_by_default_a_quarter_of_the_budget_is_read_ahead() -> None:
    policy = LRUPolicy(16)
    tell(policy, saves(*[1] * 40))
    assert begin_backward(policy, GRAPH, 39) == [Reload(key) for key in (32, 31, 30, 29)]


def test_at_least_one_block_is_read_ahead() -> None:
    policy = LRUPolicy(16, read_ahead=1)
    tell(policy, saves(*[5] * 4))
    assert begin_backward(policy, GRAPH, 3) == [Reload(2)]


def test_what_is_leaving_is_kept_where_backward_needs_it_next() -> None:
    places = Obeyed(LRUPolicy(16, read_ahead=4))
    places.tell(*saves(*[1] * 9))
    assert places.keys("leaving") == {0, 1, 2}
    assert places.tell(LayerBegin(GRAPH, 8, backward=True)) == [Reload(2), Reload(1), Reload(0)]


def test_for_what_comes_back_what_is_leaving_is_released() -> None:
    policy = LRUPolicy(8, read_ahead=2)
    tell(policy, saves(*[1] * 8))
    tell(policy, saves(*[1] * 8, graph=1, first_key=10))
    # 16 and 17 are the newest of those that stay; 10 to 14 are leaving
    assert begin_backward(policy, GRAPH, 7) == [Release(10), Release(11), Reload(7), Reload(6)]


def two_graphs() -> Obeyed:
    """All of the first graph's blocks, 0 to 11, are on the host. Two blocks are read ahead."""
    places = Obeyed(LRUPolicy(16, read_ahead=2))
    places.tell(*saves(*[1] * 12), *saves(*[1] * 24, graph=1, first_key=100))
    assert places.keys("host") >= set(range(12))
    return places


def test_a_block_that_finds_no_room_waits_for_it() -> None:
    places = Obeyed(LRUPolicy(16, read_ahead=12))
    places.tell(*saves(12, *[1] * 8))
    assert places.keys("host") == {0}
    for layer in (8, 7, 6):
        assert places.tell(LayerBegin(GRAPH, layer, backward=True), dropped(layer)) == []
    assert places.tell(LayerBegin(GRAPH, 5, backward=True), dropped(5)) == [Reload(0)]


def test_as_many_bytes_again_are_fetched_from_disk() -> None:
    places = two_graphs()
    places.tell(HostPressure(12))
    begun = places.tell(LayerBegin(GRAPH, 11, backward=True))
    assert begun[-4:] == [Reload(11), Reload(10), Fetch(9), Fetch(8)]
    assert places.tell(dropped(11)) == [Reload(9), Fetch(7)]
    assert places.tell(LayerBegin(GRAPH, 10, backward=True)) == []
    assert places.tell(dropped(10)) == [Reload(8), Fetch(6)]


def test_what_is_on_the_host_is_not_fetched() -> None:
    places = two_graphs()
    places.tell(HostPressure(9))
    begun = places.tell(LayerBegin(GRAPH, 11, backward=True))
    assert begun[-3:] == [Reload(11), Reload(10), Fetch(8)]


def test_what_left_the_longest_ago_is_spilled_first() -> None:
    places = Obeyed(LRUPolicy(16))
    places.tell(*saves(*[1] * 30))
    assert places.tell(HostPressure(2)) == [Spill(0), Spill(1)]
    assert places.tell(HostPressure(3)) == [Spill(2), Spill(3), Spill(4)]


def test_what_is_leaving_is_released_and_spilled_where_the_rest_is_too_little() -> None:
    places = Obeyed(LRUPolicy(8))
    places.tell(*saves(*[1] * 9))
    assert places.keys("host") == {0}
    assert places.tell(HostPressure(2)) == [Release(1), Spill(0), Spill(1)]


def test_what_comes_back_next_is_not_spilled() -> None:
    places = two_graphs()
    places.tell(LayerBegin(GRAPH, 11, backward=True))  # 11 and 10 are back, 9 and 8 are next
    places.tell(HostPressure(100))
    assert places.keys("disk") & set(range(12)) == set(range(8))


def test_a_second_backward_brings_back_what_left_since() -> None:
    places = Obeyed(LRUPolicy(8, read_ahead=2))
    places.tell(*saves(*[1] * 12))
    for layer in reversed(range(12)):
        places.tell(LayerBegin(GRAPH, layer, backward=True))
    places.tell(*saves(*[1] * 20, graph=1, first_key=100))
    assert places.keys("host") >= set(range(2, 12))  # 1 and 0 are not known to be used
    begun = places.tell(LayerBegin(GRAPH, 11, backward=True))
    assert begun[-2:] == [Reload(11), Reload(10)]
    assert places.tell(dropped(11)) == [Reload(9)]


def test_a_backward_that_jumps_ahead_brings_in_what_lies_below() -> None:
    places = two_graphs()
    places.tell(LayerBegin(GRAPH, 11, backward=True))
    assert places.tell(LayerBegin(GRAPH, 5, backward=True))[-2:] == [Reload(5), Reload(4)]
    again = places.tell(LayerBegin(GRAPH, 5, backward=True))
    assert not [action for action in again if isinstance(action, Reload)]


def test_what_a_backward_is_through_with_leaves_again() -> None:
    places = Obeyed(LRUPolicy(16, read_ahead=2))
    places.tell(*saves(*[1] * 40))
    for layer in reversed(range(40)):
        places.tell(LayerBegin(GRAPH, layer, backward=True))
        assert layer in places.keys("device")
        assert places.on_device() <= 16
    assert places.keys("host") > set(range(16, 32))
    assert places.keys("device") > set(range(34, 40))  # they never left, and need not now


def test_in_forward_too_what_a_backward_is_through_with_is_the_first_to_leave() -> None:
    places = Obeyed(LRUPolicy(16, read_ahead=2))
    places.tell(*saves(*[1] * 9))  # 0, 1 and 2 are leaving
    assert places.tell(LayerBegin(GRAPH, 8, backward=True)) == [Reload(2), Reload(1)]
    assert places.tell(LayerBegin(GRAPH, 1, backward=True)) == [Reload(0)]
    assert places.tell(saved(1, 0, 100))[0] == Offload(2)


def test_what_backward_reloaded_itself_leaves_again() -> None:
    places = Obeyed(LRUPolicy(16, read_ahead=2))
    places.tell(*(saved(GRAPH, layer, 10 * layer + i) for layer in range(4) for i in range(10)))
    for layer in (3, 2, 1, 0):
        places.tell(LayerBegin(GRAPH, layer, backward=True))
        assert places.on_device() <= 16
    assert places.keys("leaving", "host") >= set(range(20, 30))


def test_a_backward_that_begins_anew_goes_on_in_the_reverse_order() -> None:
    places = Obeyed(LRUPolicy(16, read_ahead=2))
    places.tell(*(saved(GRAPH, 0, key) for key in range(12)))
    places.tell(*saves(*[1] * 24, graph=1, first_key=100))
    assert places.tell(LayerBegin(GRAPH, 1, backward=True))[-2:] == [Reload(11), Reload(10)]
    assert places.tell(LayerBegin(GRAPH, 2, backward=True))[-2:] == [Reload(9), Reload(8)]


def test_a_graph_that_is_dropped_unused_brings_nothing_back() -> None:
    policy = LRUPolicy(16)
    tell(policy, saves(*[1] * 30))
    begin_backward(policy, GRAPH, 29)
    assert tell(policy, [dropped(key) for key in reversed(range(29))]) == []


def test_graphs_run_backward_in_any_order() -> None:
    places = Obeyed(LRUPolicy(16, read_ahead=2))
    places.tell(*saves(*[1] * 30))
    places.tell(*saves(*[1] * 30, graph=1, first_key=100))
    for graph, first in ((0, 0), (1, 100)):
        for layer in reversed(range(30)):
            places.tell(LayerBegin(graph, layer, backward=True))
            assert first + layer in places.keys("device")
            places.tell(dropped(first + layer))
    assert state(places.policy) == state(LRUPolicy(16, read_ahead=2))


def test_blocks_of_no_layer_move_too() -> None:
    places = Obeyed(LRUPolicy(8))
    places.tell(*(saved(7, -1, key) for key in range(12)))
    assert places.keys("host") == {0, 1, 2, 3}
    assert places.tell(saved(7, -1, 0)) == [Offload(8), Offload(9), Release(4)]
    assert places.tell(LayerBegin(7, -1, backward=True)) == [Reload(9), Reload(8)]


@settings(deadline=None)
@given(st.data())
def test_every_layer_is_back_when_its_backward_begins(data: st.DataObject) -> None:
    """If two layers are read ahead, and all blocks fit: a layer comes back while the one above it is used."""
    layers = data.draw(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=12))
    most = max(map(sum, layers))
    budget = data.draw(st.integers(4 * most, 8 * most), "budget")
    places = Obeyed(LRUPolicy(budget, read_ahead=2 * most))
    keys: list[list[int]] = []
    for layer, sizes in enumerate(layers):
        first = sum(map(len, layers[:layer]))
        keys.append(list(range(first, first + len(sizes))))
        for key, nbytes in zip(keys[-1], sizes, strict=True):
            places.tell(saved(GRAPH, layer, key, nbytes))
    reloaded: list[int] = []
    for layer in reversed(range(len(layers))):
        in_time = layer == len(layers) - 1 or places.keys("device") >= set(keys[layer])
        assert in_time, f"layer {layer} is not back before its backward"
        for event in (LayerBegin(GRAPH, layer, backward=True), *map(dropped, reversed(keys[layer]))):
            answered = places.tell(event)
            reloaded += [action.key for action in answered if isinstance(action, Reload)]
            assert places.on_device() <= budget
            if isinstance(event, LayerBegin):
                assert places.keys("device") >= set(keys[layer])
    assert reloaded == sorted(reloaded, reverse=True)


@settings(deadline=None, max_examples=300)
@given(policy_histories(), st.integers(1, 20), st.data())
def test_the_budget_is_kept(history: list[Event], budget: int, data: st.DataObject) -> None:
    read_ahead = data.draw(st.none() | st.integers(1, budget), "read_ahead")
    places = Obeyed(LRUPolicy(budget, read_ahead=read_ahead))
    for event in history:
        answered = places.tell(event)
        assert places.on_device() <= budget
        kinds = [(Offload, Release, Reload, Spill, Fetch).index(type(action)) for action in answered]
        assert kinds == sorted(kinds)


@settings(deadline=None)
@given(policy_histories(), st.integers(1, 20))
def test_nothing_is_kept_of_what_is_over(history: list[Event], budget: int) -> None:
    policy = LRUPolicy(budget)
    tell(policy, history)
    assert state(policy) == state(LRUPolicy(budget))


@pytest.mark.parametrize("budget", [1, 4, 12, 1000])
def test_it_keeps_the_contract(budget: int) -> None:
    check_policy(lambda: LRUPolicy(budget))


def test_an_event_takes_no_longer_for_more_blocks() -> None:
    few, many = (most_lines(LRUPolicy(64, read_ahead=4), num_layers) for num_layers in (100, 1000))
    assert many <= few + 10


def most_lines(policy: LRUPolicy, num_layers: int) -> int:
    """How many lines of Python the longest event of a step runs."""
    lines = 0

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    longest = 0
    for event in [HostPressure(2), *forward(GRAPH, num_layers), HostPressure(2), *backward(GRAPH, num_layers)]:
        lines = 0
        before = sys.gettrace()
        sys.settrace(count)
        policy.decide(event)
        sys.settrace(before)
        longest = max(longest, lines)
    return longest


def test_sizes_may_be_text() -> None:
    assert state(LRUPolicy("1KiB", read_ahead="0.5KiB")) == state(LRUPolicy(1024, read_ahead=512))
    with pytest.raises(ValueError, match=r"^device_bytes: 'plenty' is not a size; "):
        LRUPolicy("plenty")
    with pytest.raises(ValueError, match=r"^read_ahead: a size must be at least 1 byte, not 0$"):
        LRUPolicy(16, read_ahead=0)
    message = r"^read_ahead must be at most device_bytes, which is 1\.0 KiB, not 2\.0 KiB$"
    with pytest.raises(ValueError, match=message):
        LRUPolicy("1KiB", read_ahead="2KiB")


def test_it_suits_every_model() -> None:
    LRUPolicy(1).check(0)
    LRUPolicy(1).check(1000)

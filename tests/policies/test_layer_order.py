from __future__ import annotations

from collections.abc import Iterable

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
    LayerOrderPolicy,
    Offload,
    Policy,
    Release,
    Reload,
    Saved,
    policy_by_name,
)

Schedule = dict[int | str, list[int]]
GRAPH = 0


def schedule(policy: Policy, num_layers: int) -> tuple[Schedule, Schedule]:
    """The layers released at each layer's beginning in forward, or at its "end", and those reloaded in backward."""
    released: Schedule = {}
    reloaded: Schedule = {}
    seen: set[Action] = set()
    for event in forward(GRAPH, num_layers) + backward(GRAPH, num_layers):
        for action in policy.decide(event):
            if action in seen:
                continue
            seen.add(action)
            match event, action:
                case LayerBegin(_, layer, backward=False), Release(key):
                    released.setdefault(layer, []).append(key)
                case ForwardEnd(), Release(key):
                    released.setdefault("end", []).append(key)
                case LayerBegin(_, layer, backward=True), Reload(key):
                    reloaded.setdefault(layer, []).append(key)
                case _, Release() | Reload():
                    pytest.fail(f"{action} after {event}")
    return released, reloaded


@pytest.mark.parametrize(
    ("num_layers", "k", "released", "reloaded"),
    [
        (5, 2, {3: [0], 4: [1]}, {2: [0], 3: [1]}),
        (
            10,
            6,
            {4: [0], 5: [1], 6: [2], 7: [3], 8: [4], 9: [5]},
            {3: [0], 4: [1], 5: [2], 6: [3], 7: [4], 8: [5]},
        ),
        (
            10,
            9,
            {1: [0], 2: [1], 3: [2], 4: [3], 5: [4], 6: [5], 7: [6], 8: [7], 9: [8]},
            {0: [0], 1: [1], 2: [2], 3: [3], 4: [4], 5: [5], 6: [6], 7: [7], 8: [8]},
        ),
    ],
)
def test_the_schedule_is_transformer_engines(
    num_layers: int, k: int, released: Schedule, reloaded: Schedule
) -> None:
    assert schedule(LayerOrderPolicy(k), num_layers) == (released, reloaded)


@pytest.mark.parametrize("k", [4, None])
def test_with_all_layers_offloaded_the_last_is_released_at_the_end(k: int | None) -> None:
    released, reloaded = schedule(LayerOrderPolicy(k), 4)
    assert released == {1: [0], 2: [1], 3: [2], "end": [3]}
    assert reloaded == {3: [3], 2: [2], 1: [1], 0: [0]}


def test_with_no_layers_offloaded_nothing_happens() -> None:
    assert tell(LayerOrderPolicy(0), forward(GRAPH, 4) + backward(GRAPH, 4)) == []


@pytest.mark.parametrize(
    ("num_layers", "k", "in_flight", "released", "reloaded"),
    [
        (5, 2, 1, {4: [0], "end": [1]}, {4: [1], 3: [0]}),
        (5, 4, 1, {2: [0], 3: [1], 4: [2], "end": [3]}, {4: [3], 3: [2], 2: [1], 1: [0]}),
        (4, 4, 1, {2: [0], 3: [1], "end": [2, 3]}, {3: [3, 2], 2: [1], 1: [0]}),
        (4, 3, 9, {"end": [0, 1, 2]}, {3: [2, 1, 0]}),
    ],
)
def test_layers_in_flight_leave_later_and_come_back_earlier(
    num_layers: int, k: int, in_flight: int, released: Schedule, reloaded: Schedule
) -> None:
    assert schedule(LayerOrderPolicy(k, in_flight=in_flight), num_layers) == (released, reloaded)


@settings(deadline=None)
@given(st.data())
def test_resident_layers_are_bounded(data: st.DataObject) -> None:
    """The layer at work is resident itself, so the bound is N - k + in_flight with N - k taken as 1 at least."""
    num_layers = data.draw(st.integers(1, 12), "num_layers")
    k = data.draw(st.integers(0, num_layers), "k")
    in_flight = data.draw(st.integers(0, 4), "in_flight")
    bound = min(num_layers, max(1, num_layers - k) + in_flight)
    policy = LayerOrderPolicy(k, in_flight=in_flight)

    resident: set[int] = set()
    offloaded: set[int] = set()
    peak = 0
    for event in forward(GRAPH, num_layers):
        if isinstance(event, Saved):
            resident.add(event.key)
        for action in policy.decide(event):
            match action:
                case Offload(key):
                    assert key in resident
                    offloaded.add(key)
                case Release(key):
                    assert key in offloaded
                    resident.discard(key)
                case _:
                    pytest.fail(f"{action} in forward")
        peak = max(peak, len(resident))
    assert peak == bound
    assert offloaded == set(range(k))
    assert resident == set(range(k, num_layers))

    peak = 0
    for event in backward(GRAPH, num_layers):
        if isinstance(event, Dropped):
            resident.remove(event.key)
        for action in policy.decide(event):
            assert isinstance(action, Reload)
            assert action.key not in resident
            resident.add(action.key)
        peak = max(peak, len(resident))
        if isinstance(event, LayerBegin):
            assert event.layer in resident, f"layer {event.layer} has to be fetched on demand"
    assert peak == bound
    assert not resident


def test_a_layer_is_offloaded_when_it_ends_in_the_order_of_its_saves() -> None:
    policy = LayerOrderPolicy(1)
    policy.decide(ForwardBegin(GRAPH, 2))
    assert tell(policy, layer_forward(GRAPH, 0, 7, 3, 5)[:-1]) == []
    assert tell(policy, [LayerEnd(GRAPH, 0)]) == [Offload(7), Offload(3), Offload(5)]
    assert tell(policy, [LayerBegin(GRAPH, 1)]) == [Release(7), Release(3), Release(5)]
    assert tell(policy, layer_forward(GRAPH, 1, 8)[1:]) == []


def test_a_block_saved_by_two_layers_leaves_and_returns_with_the_later() -> None:
    policy = LayerOrderPolicy(3)
    tell(policy, [ForwardBegin(GRAPH, 6), *layer_forward(GRAPH, 0, 10, 99)])
    tell(policy, [*layer_forward(GRAPH, 1, 11, 99), *layer_forward(GRAPH, 2, 12)])
    assert tell(policy, [LayerBegin(GRAPH, 3)]) == [Release(10)]
    assert tell(policy, [LayerBegin(GRAPH, 4)]) == [Release(11), Release(99)]
    assert tell(policy, [LayerBegin(GRAPH, 5)]) == [Release(12)]
    policy.decide(ForwardEnd(GRAPH))
    assert [begin_backward(policy, GRAPH, i) for i in (5, 4, 3, 2)] == [
        [],
        [Reload(12)],
        [Reload(11), Reload(99)],
        [Reload(10)],
    ]


def test_a_block_that_a_kept_layer_saves_too_stays() -> None:
    policy = LayerOrderPolicy(1)
    tell(policy, [ForwardBegin(GRAPH, 3), *layer_forward(GRAPH, 0, 10, 99), *layer_forward(GRAPH, 1, 99)])
    assert tell(policy, [LayerBegin(GRAPH, 2), ForwardEnd(GRAPH)]) == [Release(10), Release(10)]
    assert [begin_backward(policy, GRAPH, i) for i in (2, 1, 0)] == [[], [Reload(10)], []]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_graphs_run_backward_in_either_order(order: tuple[int, int]) -> None:
    policy = LayerOrderPolicy(2)
    tell(policy, forward(0, 5) + forward(1, 5, first_key=100))
    for graph in order:
        first = 100 * graph
        assert [list(policy.decide(event)) for event in backward(graph, 5, first)[::2]] == [
            [],
            [Reload(first + 1)],
            [Reload(first)],
            [],
            [],
        ]


@settings(deadline=None)
@given(st.data())
def test_graphs_that_share_no_block_do_not_disturb_each_other(data: st.DataObject) -> None:
    k = data.draw(st.integers(0, 3), "k")
    sizes = data.draw(st.lists(st.integers(3, 6), min_size=2, max_size=3), "sizes")
    runs = [forward(g, n, 100 * g) + backward(g, n, 100 * g) for g, n in enumerate(sizes)]
    alone = [tell(LayerOrderPolicy(k), run) for run in runs]

    policy = LayerOrderPolicy(k)
    together: list[list[Action]] = [[] for _ in runs]
    turns = data.draw(st.permutations([g for g, run in enumerate(runs) for _ in run]), "turns")
    rest = [iter(run) for run in runs]
    for graph in turns:
        together[graph] += policy.decide(next(rest[graph]))
    assert together == alone


def test_a_block_saved_by_two_graphs_is_the_later_ones() -> None:
    policy = LayerOrderPolicy(1)
    tell(policy, [ForwardBegin(0, 2), *layer_forward(0, 0, 5, 99), ForwardEnd(0)])
    policy.decide(ForwardBegin(1, 2))
    assert tell(policy, layer_forward(1, 0, 6, 99)) == [Offload(6), Offload(99)]
    assert tell(policy, [LayerBegin(1, 1)]) == [Release(6), Release(99)]
    policy.decide(ForwardEnd(1))
    assert begin_backward(policy, 0, 0) == [Reload(5)]
    assert begin_backward(policy, 1, 0) == [Reload(6), Reload(99)]


def test_a_graph_whose_only_block_went_to_another_has_nothing_to_reload() -> None:
    policy = LayerOrderPolicy(1)
    tell(policy, [ForwardBegin(0, 1), *layer_forward(0, 0, 99), ForwardEnd(0)])
    tell(policy, [ForwardBegin(1, 1), *layer_forward(1, 0, 99), ForwardEnd(1)])
    assert begin_backward(policy, 0, 0) == []
    assert begin_backward(policy, 1, 0) == [Reload(99)]


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
    assert tell(policy, [Saved(GRAPH, 0, 11, nbytes=1)]) == []
    assert tell(policy, [later]) == [Offload(11)]
    assert tell(policy, [LayerEnd(GRAPH, 1), LayerBegin(GRAPH, 2)]) == [Release(10), Release(11)]


@pytest.mark.parametrize("later", [LayerBegin(GRAPH, 1), ForwardEnd(GRAPH)])
def test_a_block_saved_after_its_layers_end_is_offloaded_before_it_is_released(later: Event) -> None:
    policy = LayerOrderPolicy(2)
    tell(policy, [ForwardBegin(GRAPH, 2), *layer_forward(GRAPH, 0, 10), Saved(GRAPH, 0, 11, nbytes=1)])
    assert tell(policy, [later]) == [Offload(11), Release(10), Release(11)]


def test_a_block_that_a_later_layer_has_does_not_go_back_to_an_earlier_one() -> None:
    policy = LayerOrderPolicy(2)
    tell(policy, [ForwardBegin(GRAPH, 4), *layer_forward(GRAPH, 0, 10), *layer_forward(GRAPH, 1, 99)])
    tell(policy, [Saved(GRAPH, 0, 99, nbytes=1)])
    assert tell(policy, [LayerBegin(GRAPH, 2)]) == [Release(10)]
    assert tell(policy, [LayerBegin(GRAPH, 3)]) == [Release(99)]


def test_a_block_of_a_kept_layer_that_is_saved_after_its_end_stays() -> None:
    policy = LayerOrderPolicy(1)
    tell(policy, [ForwardBegin(GRAPH, 3), *layer_forward(GRAPH, 0), *layer_forward(GRAPH, 1, 11)])
    assert tell(policy, [Saved(GRAPH, 1, 12, nbytes=1), LayerBegin(GRAPH, 2), ForwardEnd(GRAPH)]) == []


@pytest.mark.parametrize("told", [0, 1, 3])
def test_with_all_layers_offloaded_those_beyond_the_told_number_are_too(told: int) -> None:
    policy = LayerOrderPolicy()
    run = [ForwardBegin(GRAPH, told), *forward(GRAPH, 5)[1:]]
    assert [action for action in tell(policy, run) if isinstance(action, Offload)] == [*map(Offload, range(5))]
    assert [begin_backward(policy, GRAPH, i) for i in (4, 3, 2, 1, 0)] == [[Reload(i)] for i in (4, 3, 2, 1, 0)]


def test_of_more_layers_than_told_only_the_first_are_offloaded_and_return_by_the_true_number() -> None:
    policy = LayerOrderPolicy(2)
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
    assert tell(policy, [Dropped(1), Dropped(2), Dropped(0)]) == []
    assert vars(policy) == vars(LayerOrderPolicy(3))


@settings(deadline=None)
@given(st.permutations(range(6)), st.integers(0, 6))
def test_dropped_blocks_are_not_named_again(order: list[int], dropped: int) -> None:
    policy = LayerOrderPolicy(6)
    tell(policy, forward(GRAPH, 6)[:-1])
    tell(policy, [Dropped(key) for key in order[:dropped]])
    left = set(order[dropped:])
    assert {action.key for action in policy.decide(ForwardEnd(GRAPH))} == left
    assert {a.key for i in reversed(range(6)) for a in begin_backward(policy, GRAPH, i)} == left
    assert tell(policy, [Dropped(key) for key in order[dropped:]]) == []
    assert vars(policy) == vars(LayerOrderPolicy(6))


def test_a_block_that_was_never_told_of_can_be_dropped() -> None:
    policy = LayerOrderPolicy(1)
    assert tell(policy, [Dropped(3), ForwardBegin(GRAPH, 1), Dropped(4), ForwardEnd(GRAPH)]) == []


@settings(deadline=None)
@given(policy_histories(min_layers=2))
def test_nothing_is_kept_of_what_is_over(history: list[Event]) -> None:
    policy = LayerOrderPolicy(2)
    tell(policy, history)
    assert vars(policy) == vars(LayerOrderPolicy(2))


@pytest.mark.parametrize(
    ("k", "in_flight", "min_layers"), [(None, 0, 0), (None, 2, 0), (0, 0, 0), (2, 0, 2), (2, 1, 2)]
)
def test_it_keeps_the_contract(k: int | None, in_flight: int, min_layers: int) -> None:
    check_policy(lambda: LayerOrderPolicy(k, in_flight=in_flight), min_layers=min_layers)


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^num_layers must be 0 or more, not -1$"):
        LayerOrderPolicy(-1)
    with pytest.raises(ValueError, match=r"^in_flight must be 0 or more, not -2$"):
        LayerOrderPolicy(1, in_flight=-2)


def test_more_layers_than_the_model_has_are_refused() -> None:
    message = r"^LayerOrderPolicy\(num_layers=5\) offloads more layers than the model has \(4\); use at most 4$"
    with pytest.raises(ValueError, match=message):
        LayerOrderPolicy(5).check(4)
    LayerOrderPolicy(4).check(4)
    LayerOrderPolicy(None).check(0)


def test_policies_are_known_by_name() -> None:
    policy = policy_by_name("layer-order")
    assert isinstance(policy, LayerOrderPolicy)
    assert vars(policy) == vars(LayerOrderPolicy())
    with pytest.raises(ValueError, match=r"^unknown policy 'lair-order'; known are 'layer-order', 'lru'$"):
        policy_by_name("lair-order")

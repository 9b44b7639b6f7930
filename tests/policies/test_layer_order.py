"""LayerOrderPolicy releases the first layers one after the other and reloads them in time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.policies.contract import check_policy, policy_histories
from tests.policies.events import backward, begin_backward, forward, layer_forward, state, tell
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
    Recompute,
    Release,
    Reload,
    Saved,
)
from tiered_mem.policies.actions import How

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
    assert schedule(LayerOrderPolicy(k, in_flight=0), num_layers) == (released, reloaded)


@pytest.mark.parametrize("k", [4, None])
def test_with_all_layers_offloaded_the_last_is_released_at_the_end(k: int | None) -> None:
    released, reloaded = schedule(LayerOrderPolicy(k, in_flight=0), 4)
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
            resident.update(key for key, _ in event.blocks)
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
            resident.difference_update(event.keys)
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
    policy = LayerOrderPolicy(1, in_flight=0)
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
    policy = LayerOrderPolicy(1, in_flight=0)
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


@settings(deadline=None)
@given(policy_histories(min_layers=2))
def test_nothing_is_kept_of_what_is_over(history: list[Event]) -> None:
    policy = LayerOrderPolicy(2)
    tell(policy, history)
    assert state(policy) == state(LayerOrderPolicy(2))


@pytest.mark.parametrize(
    ("k", "in_flight", "min_layers"), [(None, 0, 0), (None, 2, 0), (0, 0, 0), (2, 0, 2), (2, 1, 2)]
)
def test_it_keeps_the_contract(k: int | None, in_flight: int, min_layers: int) -> None:
    check_policy(lambda: LayerOrderPolicy(k, in_flight=in_flight), min_layers=min_layers)


@pytest.mark.parametrize("k", [None, *range(6)])
def test_where_no_layer_would_overlap_a_copy_one_more_is_kept(k: int | None) -> None:
    kept = 1 if k in (None, 4, 5) else 0
    assert schedule(LayerOrderPolicy(k), 5) == schedule(LayerOrderPolicy(k, in_flight=kept), 5)


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^offload must be 0 or more, not -1$"):
        LayerOrderPolicy(-1)
    with pytest.raises(ValueError, match=r"^in_flight must be 0 or more, not -2$"):
        LayerOrderPolicy(1, in_flight=-2)


def test_more_layers_than_the_model_has_are_refused() -> None:
    message = r"^LayerOrderPolicy\(offload=5\) offloads more layers than the model has \(4\); use at most 4$"
    with pytest.raises(ValueError, match=message):
        LayerOrderPolicy(5).check(4)
    LayerOrderPolicy(4).check(4)
    LayerOrderPolicy(None).check(0)


@pytest.mark.parametrize("how", ["cheap", "full"])
def test_each_layer_is_computed_again_in_forward_alone(how: How) -> None:
    answers = LayerOrderPolicy(2, recompute=how), LayerOrderPolicy(2)
    for event in forward(GRAPH, 4) + backward(GRAPH, 4):
        treated, kept = (list(policy.decide(event)) for policy in answers)
        wanted = isinstance(event, LayerBegin) and not event.backward
        assert treated == ([Recompute(event.layer, how)] if wanted else []) + kept

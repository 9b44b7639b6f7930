"""Which blocks SynchronizationDictPolicy moves with a layer: several, shared ones, late ones, dropped ones."""

from __future__ import annotations

import pytest

from tests.policies.events import begin_backward, dropped, layer_forward, saved, tell
from tiered_mem.policies import (
    Event,
    ForwardBegin,
    ForwardEnd,
    LayerBegin,
    LayerEnd,
    Offload,
    Release,
    Reload,
    SynchronizationDictPolicy,
)

GRAPH = 0


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
    assert tell(policy, [saved(GRAPH, 0, 11)]) == []
    assert tell(policy, [later]) == [Offload(11)]
    assert tell(policy, [LayerEnd(GRAPH, 1)]) == []
    assert tell(policy, [LayerBegin(GRAPH, 2)]) == [Release(10), Release(11)]


@pytest.mark.parametrize("at", [LayerBegin(GRAPH, 2), LayerBegin(GRAPH, 0, backward=True)])
def test_a_block_saved_after_its_layers_end_is_offloaded_before_it_is_released(at: LayerBegin) -> None:
    policy = SynchronizationDictPolicy({1: (not at.backward, at.layer, False, 2)})
    tell(policy, [ForwardBegin(GRAPH, 3), *layer_forward(GRAPH, 0), *layer_forward(GRAPH, 1, 10)])
    tell(policy, [saved(GRAPH, 1, 11)])
    assert tell(policy, [at]) == [Offload(11), Release(10), Release(11)]


def test_a_block_saved_after_its_layers_release_is_released_as_well() -> None:
    policy = SynchronizationDictPolicy({0: (True, 1, False, 1)})
    tell(policy, [ForwardBegin(GRAPH, 2), *layer_forward(GRAPH, 0, 10), LayerBegin(GRAPH, 1)])
    tell(policy, [saved(GRAPH, 0, 11)])
    assert tell(policy, [ForwardEnd(GRAPH)]) == [Offload(11), Release(11)]
    assert begin_backward(policy, GRAPH, 1) == [Reload(10), Reload(11)]


def test_a_block_saved_just_before_its_layers_reload_stays() -> None:
    policy = SynchronizationDictPolicy({0: (True, 1, True, 2)})
    tell(policy, [ForwardBegin(GRAPH, 3), *layer_forward(GRAPH, 0, 10), LayerBegin(GRAPH, 1)])
    tell(policy, [saved(GRAPH, 0, 11)])
    assert tell(policy, [LayerBegin(GRAPH, 2), ForwardEnd(GRAPH)]) == [Reload(10), Reload(11)]


def test_a_block_saved_after_its_layers_reload_stays() -> None:
    policy = SynchronizationDictPolicy({0: (True, 1, True, 2)})
    tell(policy, [ForwardBegin(GRAPH, 3), *layer_forward(GRAPH, 0, 10)])
    assert tell(policy, [LayerBegin(GRAPH, 1), LayerBegin(GRAPH, 2)]) == [Release(10), Reload(10)]
    tell(policy, [saved(GRAPH, 0, 11)])
    assert tell(policy, [ForwardEnd(GRAPH), LayerBegin(GRAPH, 0, backward=True)]) == []


def test_a_block_saved_by_two_graphs_is_the_later_ones() -> None:
    policy = SynchronizationDictPolicy({0: (True, 1, False, 1)})
    tell(policy, [ForwardBegin(0, 2), *layer_forward(0, 0, 5, 99), LayerBegin(0, 1), ForwardEnd(0)])
    tell(policy, [ForwardBegin(1, 2), *layer_forward(1, 0, 6, 99), LayerBegin(1, 1), ForwardEnd(1)])
    assert begin_backward(policy, 0, 1) == [Reload(5)]
    assert begin_backward(policy, 1, 1) == [Reload(6), Reload(99)]


def test_dropped_blocks_are_not_named_again() -> None:
    policy = SynchronizationDictPolicy({0: (True, 2, False, 2)})
    tell(policy, [ForwardBegin(GRAPH, 3), *layer_forward(GRAPH, 0, 10, 11, 12), dropped(10)])
    tell(policy, [saved(GRAPH, 0, 13), dropped(13)])
    assert tell(policy, [LayerBegin(GRAPH, 2), dropped(11), ForwardEnd(GRAPH)]) == [Release(11), Release(12)]
    assert begin_backward(policy, GRAPH, 2) == [Reload(12)]

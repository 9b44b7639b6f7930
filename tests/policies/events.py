"""Runs of a model as a policy is told of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tiered_mem.policies import (
    Action,
    Dropped,
    Event,
    ForwardBegin,
    ForwardEnd,
    LayerBegin,
    LayerEnd,
    Policy,
    Saved,
)


def saved(graph: int, layer: int, key: int, nbytes: int = 1) -> Saved:
    """One block."""
    return Saved(graph, layer, [(key, nbytes)])


def dropped(key: int) -> Dropped:
    """One block."""
    return Dropped([key])


def layer_forward(graph: int, layer: int, *keys: int) -> list[Event]:
    """A layer that saves `keys`."""
    blocks = [(key, 1) for key in keys]
    return [LayerBegin(graph, layer), Saved(graph, layer, blocks), LayerEnd(graph, layer)]


def forward(graph: int, num_layers: int, first_key: int = 0) -> list[Event]:
    """Layer i saves one block, `first_key` + i."""
    layers = [event for i in range(num_layers) for event in layer_forward(graph, i, first_key + i)]
    return [ForwardBegin(graph, num_layers), *layers, ForwardEnd(graph)]


def backward(graph: int, num_layers: int, first_key: int = 0) -> list[Event]:
    """Each layer's block is dropped when its backward ends."""
    return [
        event
        for i in reversed(range(num_layers))
        for event in (LayerBegin(graph, i, backward=True), dropped(first_key + i))
    ]


def tell(policy: Policy, events: Iterable[Event]) -> list[Action]:
    return [action for event in events for action in policy.decide(event)]


def begin_backward(policy: Policy, graph: int, layer: int) -> list[Action]:
    return list(policy.decide(LayerBegin(graph, layer, backward=True)))


def state(policy: Policy) -> dict[str, Any]:
    """What a policy keeps of its own."""
    return {name: value for name, value in vars(policy).items() if name != "places"}

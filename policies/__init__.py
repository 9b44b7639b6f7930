"""Policies decide what is offloaded and reloaded, and when. Pure: events in, actions out, no torch."""

from collections.abc import Callable

from .base import (
    Action,
    Dropped,
    Event,
    Fetch,
    ForwardBegin,
    ForwardEnd,
    HostPressure,
    LayerBegin,
    LayerEnd,
    ManualPolicy,
    Offload,
    Policy,
    Release,
    Reload,
    Saved,
    Spill,
)
from .layer_order import LayerOrderPolicy
from .lru import LRUPolicy
from .synchronization_dict import SynchronizationDictPolicy

__all__ = [
    "Action",
    "Dropped",
    "Event",
    "Fetch",
    "ForwardBegin",
    "ForwardEnd",
    "HostPressure",
    "LRUPolicy",
    "LayerBegin",
    "LayerEnd",
    "LayerOrderPolicy",
    "ManualPolicy",
    "Offload",
    "Policy",
    "Release",
    "Reload",
    "Saved",
    "Spill",
    "SynchronizationDictPolicy",
    "policy_by_name",
]

_NAMED: dict[str, Callable[[], Policy]] = {"layer-order": LayerOrderPolicy, "lru": LRUPolicy}


def policy_by_name(name: str) -> Policy:
    """A policy with its default arguments. Raises ValueError for an unknown name."""
    if name not in _NAMED:
        raise ValueError(f"unknown policy {name!r}; known are {', '.join(map(repr, _NAMED))}")
    return _NAMED[name]()

"""Policies decide when what is offloaded and reloaded. Pure: events in, actions out, no torch."""

from .base import (
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
)
from .layer_order import LayerOrderPolicy
from .manual import ManualPolicy
from .synchronization_dict import SynchronizationDictPolicy

__all__ = [
    "Action",
    "Dropped",
    "Event",
    "ForwardBegin",
    "ForwardEnd",
    "LayerBegin",
    "LayerEnd",
    "LayerOrderPolicy",
    "ManualPolicy",
    "Offload",
    "Policy",
    "Release",
    "Reload",
    "Saved",
    "SynchronizationDictPolicy",
    "policy_by_name",
]

_NAMED = {"layer-order": LayerOrderPolicy}


def policy_by_name(name: str) -> Policy:
    """A policy with its default arguments. Raises ValueError for an unknown name."""
    if name not in _NAMED:
        raise ValueError(f"unknown policy {name!r}; known are {', '.join(map(repr, _NAMED))}")
    return _NAMED[name]()

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
    Memory,
    Offload,
    OnRequest,
    Policy,
    Refused,
    Release,
    Reload,
    Saved,
    Spill,
    StepBegin,
    StepEnd,
    StepMeasured,
    Used,
)
from .layer_order import LayerOrderPolicy
from .lru import LRUPolicy
from .planned import PlannedPolicy
from .planning.link import Link
from .planning.report import Report
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
    "Link",
    "ManualPolicy",
    "Memory",
    "Offload",
    "OnRequest",
    "PlannedPolicy",
    "Policy",
    "Refused",
    "Release",
    "Reload",
    "Report",
    "Saved",
    "Spill",
    "StepBegin",
    "StepEnd",
    "StepMeasured",
    "SynchronizationDictPolicy",
    "Used",
    "policy_by_name",
]

_NAMED: dict[str, Callable[[], Policy]] = {"layer-order": LayerOrderPolicy, "lru": LRUPolicy}


def policy_by_name(name: str) -> Policy:
    """A policy with its default arguments. Raises ValueError for an unknown name."""
    if name not in _NAMED:
        raise ValueError(f"unknown policy {name!r}; known are 'auto', {', '.join(map(repr, _NAMED))}")
    return _NAMED[name]()

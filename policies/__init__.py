"""Policies decide what is offloaded and reloaded, and when. Pure: events in, actions out, no torch."""

from .base import (
    Action,
    Dropped,
    Each,
    Event,
    ExactMemory,
    Fetch,
    ForwardBegin,
    ForwardEnd,
    HostPressure,
    LayerBegin,
    LayerEnd,
    LayerMemory,
    ManualPolicy,
    Memory,
    MoreBlocks,
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
from .planning.disk_and_states import StatesShare
from .planning.plan import BudgetTooSmall, Link
from .planning.report import Report
from .synchronization_dict import SynchronizationDictPolicy

__all__ = [
    "Action",
    "BudgetTooSmall",
    "Dropped",
    "Each",
    "Event",
    "ExactMemory",
    "Fetch",
    "ForwardBegin",
    "ForwardEnd",
    "HostPressure",
    "LRUPolicy",
    "LayerBegin",
    "LayerEnd",
    "LayerMemory",
    "LayerOrderPolicy",
    "Link",
    "ManualPolicy",
    "Memory",
    "MoreBlocks",
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
    "StatesShare",
    "StepBegin",
    "StepEnd",
    "StepMeasured",
    "SynchronizationDictPolicy",
    "Used",
    "policy_by_name",
]


def policy_by_name(name: str, *, device_bytes: int | None = None) -> Policy:
    """A policy with its default arguments; "lru" with so many bytes, or its own default. ValueError if unknown."""
    match name:
        case "layer-order":
            return LayerOrderPolicy()
        case "lru":
            return LRUPolicy() if device_bytes is None else LRUPolicy(device_bytes)
    raise ValueError(f"unknown policy {name!r}; known are 'auto', 'layer-order', 'lru'")

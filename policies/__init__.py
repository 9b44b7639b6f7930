"""Policies decide what is offloaded and reloaded, and when. Pure: events in, actions out, no torch.

This is for users and for policies of their own. Events that are told only to a policy that asks are in `base`.
"""

from .actions import Action, Each, Fetch, Offload, Recompute, Release, Reload, Retain, Spill
from .base import (
    Dropped,
    Event,
    ForwardBegin,
    ForwardEnd,
    HostPressure,
    LayerBegin,
    LayerEnd,
    ManualPolicy,
    Policy,
    Saved,
)
from .layer_order import LayerOrderPolicy
from .lru import LRUPolicy
from .places import Place, Placed, Places
from .planned import PlannedPolicy
from .planning.profile import Link
from .synchronization_dict import SynchronizationDictPolicy

__all__ = [
    "Action",
    "Dropped",
    "Each",
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
    "Offload",
    "Place",
    "Placed",
    "Places",
    "PlannedPolicy",
    "Policy",
    "Recompute",
    "Release",
    "Reload",
    "Retain",
    "Saved",
    "Spill",
    "SynchronizationDictPolicy",
]

"""Transformer Engine's interface for offloading: change one import and keep the code.

A thin layer over TieringManager, with the same blocks, streams and pools. docs/migrating.md says what differs.
"""

from .context import CpuOffloadContext, get_cpu_offload_context
from .layer_state import OffloadableLayerState
from .marks import is_cpu_offload_enabled, mark_activation_offload, mark_not_offload, start_offload
from .synchronizers import (
    DefaultOffloadSynchronizer,
    ManualOffloadSynchronizer,
    OffloadSynchronizer,
    SynchronizationDictSynchronizer,
)

__all__ = [
    "CpuOffloadContext",
    "DefaultOffloadSynchronizer",
    "ManualOffloadSynchronizer",
    "OffloadSynchronizer",
    "OffloadableLayerState",
    "SynchronizationDictSynchronizer",
    "get_cpu_offload_context",
    "is_cpu_offload_enabled",
    "mark_activation_offload",
    "mark_not_offload",
    "start_offload",
]

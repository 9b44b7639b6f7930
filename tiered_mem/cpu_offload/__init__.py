"""Transformer Engine's interface for offloading: change one import and keep the code.

A thin layer over TieringManager, with the same blocks, streams and pools. docs/migrating.md says what differs.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from ..activations.contexts import LayerContext
from ..tiers.host_budget import HostBytes
from .synchronizers import (
    DefaultOffloadSynchronizer,
    ManualOffloadSynchronizer,
    OffloadableLayerState,
    OffloadSynchronizer,
    SynchronizationDictSynchronizer,
    is_cpu_offload_enabled,
    mark_activation_offload,
    mark_not_offload,
    start_offload,
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


class CpuOffloadContext(LayerContext):
    """Entered once for each layer. `offload_synchronizer` decides when the layers move."""

    def __init__(self, synchronizer: OffloadSynchronizer) -> None:
        super().__init__(synchronizer.sequence)
        self.offload_synchronizer = synchronizer


def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
    manual_synchronization: bool = False,
    retain_pinned_cpu_buffers: bool = False,
    offload_stream: torch.Stream | None = None,
    synchronization_dict: Mapping[int, tuple[bool, int, bool, int]] | None = None,
    *,
    device: str | torch.device | None = None,
    host_bytes: HostBytes = None,
) -> tuple[Any, ...]:
    """A context to run each layer in, and a function to pass each layer's output through:

        context, sync = get_cpu_offload_context(enabled=True, num_layers=4, model_layers=20)
        for layer in layers:
            with context:
                x = layer(x)
            x = sync(x)

    num_layers: how many layers move: at most model_layers - 1.
    model_layers: how many layers run in one iteration; with microbatches in flight, layers x microbatches.
    manual_synchronization: the user moves the layers by a ManualOffloadSynchronizer, which is returned third.
    synchronization_dict: which layers move, and when, in place of num_layers: see SynchronizationDictPolicy.
    offload_stream: for the copies in both directions, with manual_synchronization only.
    device, host_bytes: as for TieringManager; the device is the current accelerator by default.
    enabled: False gives a context and a function that do nothing.
    offload_weights: weights stay; gives a DeprecationWarning.
    offload_activations, double_buffering, retain_pinned_cpu_buffers: need not be given. Host memory is kept in a
        pool and used again in any case.

    Raises ValueError for arguments that do not go together, or that no schedule can satisfy.
    """
    disabled = (contextlib.nullcontext(), _unchanged, *([None] if manual_synchronization else []))
    if not enabled:
        return disabled
    if not offload_weights and not offload_activations:
        raise ValueError("offloading is enabled, and neither activations nor weights are to be offloaded")
    if offload_weights:
        warnings.warn("offload_weights has no effect: weights stay", DeprecationWarning, stacklevel=2)
        if not offload_activations:
            return disabled
    if manual_synchronization and synchronization_dict is not None:
        raise ValueError("manual_synchronization and synchronization_dict exclude each other")
    if offload_stream is not None and not manual_synchronization:
        raise ValueError("offload_stream needs manual_synchronization=True")
    where: dict[str, Any] = {"device": device, "host_bytes": host_bytes}
    synchronizer: OffloadSynchronizer
    if manual_synchronization:
        synchronizer = ManualOffloadSynchronizer(model_layers, offload_stream=offload_stream, **where)
    elif synchronization_dict is not None:
        synchronizer = SynchronizationDictSynchronizer(model_layers, synchronization_dict, **where)
    else:
        _check_num_layers(num_layers, model_layers)
        synchronizer = DefaultOffloadSynchronizer(model_layers, num_layers, **where)
    context = CpuOffloadContext(synchronizer)
    return context, context.sync, *([synchronizer] if manual_synchronization else [])


def _check_num_layers(num_layers: int, model_layers: int) -> None:
    if num_layers > model_layers - 1:
        raise ValueError(
            f"num_layers={num_layers} of model_layers={model_layers}: the last layer cannot be offloaded, so that "
            f"num_layers may be at most {model_layers - 1}. TieringManager.offload_context can offload all"
        )
    if num_layers == model_layers - 1:
        warnings.warn(
            f"num_layers={num_layers} of model_layers={model_layers} leaves no layer whose computation could hide "
            "the copies; offload fewer, or use LayerOrderPolicy(in_flight=1)",
            UserWarning,
            stacklevel=3,
        )


def _unchanged(output: torch.Tensor) -> torch.Tensor:
    return output

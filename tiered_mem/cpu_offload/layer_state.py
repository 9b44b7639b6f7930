"""The tensors of one layer, pushed and popped by hand."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..activations.forward_pass import ForwardPass
from ..ground.interrupts import uninterrupted
from ..manager import TieringManager
from ..policies.base import ManualPolicy
from ..tiers.host_budget import HostBytes
from .tensors import MIN_ELEMENTS, LayerMoves, Pushed, PushedTensors, device_of


class OffloadableLayerState:
    """Offloads and reloads pushed tensors, one step after the other, as often as the user likes:

        push_tensor, start_offload, release_activation_forward_gpu_memory, start_reload, pop_tensor,
        release_all_memory

    A step out of order is a RuntimeError.

    offload_stream: for the copies in both directions; its device is the tensors'.
    retain_pinned_cpu_buffers: host memory is kept in a pool and used again in any case.
    host_bytes: as for TieringManager.
    manager: shared by several states, with a ManualPolicy, in place of one of its own; it has its own stream.
    """

    def __init__(
        self,
        offload_stream: torch.Stream | None = None,
        retain_pinned_cpu_buffers: bool = False,
        *,
        host_bytes: HostBytes = None,
        manager: TieringManager | None = None,
    ) -> None:
        self.manager = manager or TieringManager(
            policy=ManualPolicy(),
            device=device_of(offload_stream),
            host_bytes=host_bytes,
            transfer_stream=offload_stream,
        )
        self._movable = self.manager.contexts.movable(min_elements=MIN_ELEMENTS)
        self._tensors = PushedTensors()
        self._moves = LayerMoves(self.manager.activations)
        self._forward: ForwardPass | None = None

    @property
    def state(self) -> str:
        """not_offloaded, offload_started, offload_finished or reload_started."""
        return self._moves.state

    @uninterrupted
    def push_tensor(self, tensor: torch.Tensor) -> Pushed:
        """Takes over a tensor, which stays usable."""
        self._moves.require("push_tensor", "not_offloaded")
        if self._forward is None:
            self._forward = ForwardPass(self.manager.activations, self._movable, 1)
            self._forward.begin_layer()
        return self._tensors.push(self._forward, tensor)

    @uninterrupted
    def start_offload(self) -> None:
        """Starts to copy the pushed tensors to the host."""
        self._moves.start_offload(self._keys())

    @uninterrupted
    def release_activation_forward_gpu_memory(self) -> None:
        """Gives up the device memory. Later work on the current stream waits for the copies."""
        self._moves.release(self._keys())

    @uninterrupted
    def start_reload(self) -> None:
        """Starts to copy the tensors back to the device."""
        self._moves.start_reload(self._keys())

    def pop_tensor(self, pushed: Pushed) -> torch.Tensor:
        """The tensor, ready for later work on the current stream. It can be popped again."""
        self._moves.require("pop_tensor", "not_offloaded", "reload_started")
        return self._tensors.pop(pushed)

    @uninterrupted
    def release_all_memory(self) -> None:
        """Drops all pushed tensors, in any state."""
        self._tensors.drop_all()
        if self._forward is not None:
            self._forward.end()
        self._forward = None
        self._moves = LayerMoves(self.manager.activations)

    def get_offloaded_total_size_mb(self) -> float:
        """The size in MiB of the tensors that were offloaded and not dropped since; they may be back."""
        return self.manager.activations.offloaded_bytes(self._keys()) / (1 << 20)

    def _keys(self) -> Iterable[int]:
        return self._forward.keys[0] if self._forward is not None else ()

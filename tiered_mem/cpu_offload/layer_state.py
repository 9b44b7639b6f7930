"""The tensors of one layer, pushed and popped by hand."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable
from typing import Any

import torch

from ..activations.activations import Activations
from ..activations.forward_pass import ForwardPass, SavedTensor
from ..activations.movable import Movable
from ..device import default_device
from ..host_budget import HostBytes
from ..interrupts import uninterrupted
from ..manager import TieringManager
from ..policies import ManualPolicy, Offload, Release, Reload
from ..wrappers import take_apart

# What a push returns: a number; the tensor itself, if it stays; of a tensor made of parts, what each part's push
# returned, and what makes it of them again.
Pushed = int | torch.Tensor | tuple[list[Any], list[Any]]

# Transformer Engine's threshold.
MIN_ELEMENTS = 256 * 1024


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
        self._movable = Movable(self.manager.device, (), self.manager.stayed(), min_elements=MIN_ELEMENTS)
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
        return self._tensors.push(self._forward, 0, tensor)

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


class LayerMoves:
    """The steps of a layer's memory, which come one after the other."""

    def __init__(self, activations: Activations) -> None:
        self._activations = activations
        self.state = "not_offloaded"

    def start_offload(self, keys: Iterable[int]) -> None:
        self.require("start_offload", "not_offloaded")
        self._activations.act(Offload(key) for key in keys)
        self.state = "offload_started"

    def release(self, keys: Iterable[int]) -> None:
        self.require("release_activation_forward_gpu_memory", "offload_started")
        self._activations.act(Release(key) for key in keys)
        self.state = "offload_finished"

    def start_reload(self, keys: Iterable[int]) -> None:
        self.require("start_reload", "offload_finished")
        self._activations.act(Reload(key) for key in keys)
        self.state = "reload_started"

    def require(self, step: str, *states: str) -> None:
        """Raises RuntimeError unless the state is one of `states`."""
        if self.state not in states:
            raise RuntimeError(f"Invalid state: {self.state} for {step}, must be one of {list(states)}")


class PushedTensors:
    """Saved tensors under numbers. No number is ever used twice, here or elsewhere."""

    def __init__(self) -> None:
        # So that another one's number is an error here, and not another tensor.
        self._numbers = itertools.count(secrets.randbits(60))
        self._saved: dict[int, dict[int, SavedTensor]] = {}

    def push(self, forward: ForwardPass, layer: int, tensor: torch.Tensor) -> Pushed:
        """Saves a tensor for a layer that has begun."""
        if not isinstance(tensor, torch.nn.Parameter) and type(tensor) is not torch.Tensor:
            apart = take_apart(tensor) if forward.movable.large(tensor) else None
            if apart is not None:
                parts = [None if part is None else self.push(forward, layer, part) for part in apart.parts]
                return parts, [apart.rebuild]
        saved = forward.pack(tensor)
        if not isinstance(saved, SavedTensor):
            return tensor
        number = next(self._numbers)
        self._saved.setdefault(layer, {})[number] = saved
        return number

    def pop(self, pushed: Pushed) -> torch.Tensor:
        """The tensor of a number. Raises RuntimeError where it was dropped, or is another object's."""
        if isinstance(pushed, torch.Tensor):
            return pushed
        if isinstance(pushed, tuple):
            parts, (rebuild,) = pushed
            whole: torch.Tensor = rebuild([None if part is None else self.pop(part) for part in parts])
            return whole
        for saved in self._saved.values():
            if pushed in saved:
                return saved[pushed].load()
        raise RuntimeError(
            f"tensor {pushed} is not held any more: its layer was released, or it was never pushed here"
        )

    def drop(self, layer: int) -> None:
        self._saved.pop(layer, None)

    def drop_all(self) -> None:
        self._saved.clear()


def device_of(stream: torch.Stream | None) -> str:
    """The device of a stream, or the current accelerator."""
    return default_device() if stream is None else str(stream.device)

"""When layers move: by a default schedule, by a dictionary, or by hand; and single tensors, with marks."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch

from ..activations.contexts import LayerSequence
from ..activations.driver import Activations
from ..activations.hooks import ForwardPass, SavedTensor, is_packing
from ..activations.movable import mark_stays, mark_whole
from ..ground.interrupts import uninterrupted
from ..ground.wrappers import plain_tensors, take_apart
from ..manager import TieringManager
from ..policies import LayerOrderPolicy, ManualPolicy, Policy, SynchronizationDictPolicy
from ..policies.actions import Offload, Release, Reload
from ..tiers.host_budget import HostBytes


class OffloadSynchronizer:
    """Numbers the layers, and tells a policy of them.

    num_layers: of one iteration; with several microbatches in flight, layers x microbatches. The layers are
        numbered in the order in which they begin, and after the last one the next is 0 again.
    policy: decides when they move. None leaves that to the user.
    retain_pinned_cpu_buffers: host memory is kept in a pool and used again in any case.
    offload_stream: for the copies in both directions, in place of a stream for each.
    device, host_bytes: as for TieringManager; the device is the current accelerator by default.
    """

    def __init__(
        self,
        num_layers: int,
        retain_pinned_cpu_buffers: bool = False,
        offload_stream: torch.Stream | None = None,
        *,
        policy: Policy | None = None,
        variable_depth: bool = False,
        device: str | torch.device | None = None,
        host_bytes: HostBytes = None,
    ) -> None:
        if num_layers < 1:
            raise ValueError(f"a model has at least one layer, not {num_layers}")
        policy = ManualPolicy() if policy is None else policy
        policy.check(num_layers)
        self.num_layers = num_layers
        self.manager = TieringManager(
            policy=policy,
            device=device_of(offload_stream) if device is None else device,
            host_bytes=host_bytes,
            transfer_stream=offload_stream,
        )
        movable = self.manager._contexts.movable(min_elements=MIN_ELEMENTS)
        self.sequence = LayerSequence(self.manager._activations, movable, num_layers, variable_depth=variable_depth)
        # The layers whose pushed tensors are taken over.
        self._offloaded: Container[int] = range(num_layers)
        self._tensors = PushedTensors()
        self._graph: int | None = None
        self._backward_of: int | None = None
        # What the user did by hand, by graph and layer.
        self._moves: dict[tuple[int, int], LayerMoves] = {}

    @uninterrupted
    def fwd_step(self) -> int:
        """A layer's forward begins. Returns its number. A new iteration drops all pushed tensors."""
        self.sequence.end()
        layer = self.sequence.begin()
        if self.sequence.forward.graph != self._graph:
            self._graph = self.sequence.forward.graph
            self._tensors.drop_all()
        return layer

    @uninterrupted
    def bwd_step(self, layer_num: int) -> None:
        """A layer's backward begins. Drops the tensors that the layer before pushed."""
        self.finish_part_of_bwd()
        self.sequence.end()
        self._backward_of = layer_num
        self.sequence.forward.begin_backward(layer_num)

    @uninterrupted
    def finish_part_of_bwd(self) -> None:
        """A backward has ended. Drops the tensors that its last layer pushed."""
        if self._backward_of is not None:
            self._tensors.drop(self._backward_of)
        self._backward_of = None

    @uninterrupted
    def push_tensor(self, tensor: torch.Tensor) -> Pushed:
        """Saves a tensor for the layer whose forward runs. Raises RuntimeError before the first fwd_step."""
        layer = self.sequence.layer
        if layer is None:
            raise RuntimeError("no layer's forward runs: call fwd_step first")
        return self._tensors.push(self.sequence.forward, tensor) if layer in self._offloaded else tensor

    def pop_tensor(self, pushed: Pushed) -> torch.Tensor:
        """A pushed tensor, whatever layer is current. Raises RuntimeError if its layer was dropped."""
        return self._tensors.pop(pushed)

    def get_offloaded_total_size_mb(self) -> float:
        """The size in MiB of the tensors that this iteration offloaded and still needs; they may be back."""
        return self.manager._activations.offloaded_bytes(self.sequence.keys()) / (1 << 20)


class DefaultOffloadSynchronizer(OffloadSynchronizer):
    """The first `num_offloaded_layers` move, on Transformer Engine's schedule: see LayerOrderPolicy."""

    def __init__(
        self,
        num_layers: int,
        num_offloaded_layers: int,
        retain_pinned_cpu_buffers: bool = False,
        offload_stream: torch.Stream | None = None,
        *,
        device: str | torch.device | None = None,
        host_bytes: HostBytes = None,
    ) -> None:
        super().__init__(
            num_layers,
            offload_stream=offload_stream,
            policy=LayerOrderPolicy(num_offloaded_layers, in_flight=0),
            variable_depth=True,
            device=device,
            host_bytes=host_bytes,
        )
        self._offloaded = range(num_offloaded_layers)


class SynchronizationDictSynchronizer(OffloadSynchronizer):
    """The layers in a dictionary move, at the moments in it: see SynchronizationDictPolicy."""

    def __init__(
        self,
        num_layers: int,
        synchronization_dict: Mapping[int, tuple[bool, int, bool, int]],
        retain_pinned_cpu_buffers: bool = False,
        offload_stream: torch.Stream | None = None,
        *,
        device: str | torch.device | None = None,
        host_bytes: HostBytes = None,
    ) -> None:
        policy = SynchronizationDictPolicy(synchronization_dict)
        super().__init__(
            num_layers, offload_stream=offload_stream, policy=policy, device=device, host_bytes=host_bytes
        )
        self._offloaded = frozenset(synchronization_dict)


class ManualOffloadSynchronizer(OffloadSynchronizer):
    """The user moves each layer by its number. A layer that is never named stays on the device.

    A move out of order raises RuntimeError, and so does a layer that this iteration has not begun. Backward needs
    no move: it fetches what was not reloaded by then.
    """

    @uninterrupted
    def start_offload_layer(self, layer_id: int) -> None:
        """Starts to copy the layer's tensors to the host."""
        self._moves_of(layer_id).start_offload()

    @uninterrupted
    def release_activation_forward_gpu_memory(self, layer_id: int) -> None:
        """Gives up their device memory. Later work on the current stream waits for the copies."""
        self._moves_of(layer_id).release()

    @uninterrupted
    def start_reload_layer(self, layer_id: int) -> None:
        """Starts to copy them back to the device."""
        self._moves_of(layer_id).start_reload()

    def _moves_of(self, layer: int) -> LayerMoves:
        forward = self.sequence.forward
        if not 0 <= layer < forward.layers:
            raise RuntimeError(
                f"layer {layer} has not begun: this iteration has begun {forward.layers} of {self.num_layers}"
            )
        self._moves = {key: moves for key, moves in self._moves.items() if key[0] == forward.graph}
        moves = LayerMoves(self.manager._activations, forward.keys[layer])
        return self._moves.setdefault((forward.graph, layer), moves)


class OffloadableLayerState:
    """Offloads and reloads the pushed tensors of one layer, one move after the other, as often as the user likes:

        push_tensor, start_offload, release_activation_forward_gpu_memory, start_reload, pop_tensor,
        release_all_memory

    A move out of order is a RuntimeError.

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
        self._movable = self.manager._contexts.movable(min_elements=MIN_ELEMENTS)
        self._tensors = PushedTensors()
        self._moves = LayerMoves(self.manager._activations)
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
            self._forward = ForwardPass(self.manager._activations, self._movable, 1)
            self._forward.begin_layer()
            self._moves.keys = self._forward.keys[0]
        return self._tensors.push(self._forward, tensor)

    @uninterrupted
    def start_offload(self) -> None:
        """Starts to copy the pushed tensors to the host."""
        self._moves.start_offload()

    @uninterrupted
    def release_activation_forward_gpu_memory(self) -> None:
        """Gives up the device memory. Later work on the current stream waits for the copies."""
        self._moves.release()

    @uninterrupted
    def start_reload(self) -> None:
        """Starts to copy the tensors back to the device."""
        self._moves.start_reload()

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
        self._moves = LayerMoves(self.manager._activations)

    def get_offloaded_total_size_mb(self) -> float:
        """The size in MiB of the tensors that were offloaded and not dropped since; they may be back."""
        return self.manager._activations.offloaded_bytes(self._moves.keys) / (1 << 20)


# What a push returns: a number; the tensor itself, if it stays; of a tensor made of parts, what each part's push
# returned, and what makes it of them again.
Pushed = int | torch.Tensor | tuple[list[Any], list[Any]]

# Transformer Engine's threshold.
MIN_ELEMENTS = 256 * 1024


class PushedTensors:
    """Saved tensors under numbers. No number is ever used twice, here or elsewhere."""

    def __init__(self) -> None:
        # So that another one's number is an error here, and not another tensor.
        self._numbers = itertools.count(secrets.randbits(60))
        self._saved: dict[int, SavedTensor] = {}

    def push(self, forward: ForwardPass, tensor: torch.Tensor) -> Pushed:
        """Saves a tensor for the layer of the forward that runs."""
        if not isinstance(tensor, torch.nn.Parameter) and type(tensor) is not torch.Tensor:
            apart = take_apart(tensor) if forward.movable.large(tensor) else None
            if apart is not None:
                parts = [None if part is None else self.push(forward, part) for part in apart.parts]
                return parts, [apart.rebuild]
        saved = forward.pack(tensor)
        if not isinstance(saved, SavedTensor):
            return tensor
        number = next(self._numbers)
        self._saved[number] = saved
        return number

    def pop(self, pushed: Pushed) -> torch.Tensor:
        """The tensor of a number. Raises RuntimeError where it was dropped, or is another object's."""
        if isinstance(pushed, torch.Tensor):
            return pushed
        if isinstance(pushed, tuple):
            parts, (rebuild,) = pushed
            whole: torch.Tensor = rebuild([None if part is None else self.pop(part) for part in parts])
            return whole
        if pushed in self._saved:
            return self._saved[pushed].load()
        raise RuntimeError(
            f"tensor {pushed} is not held any more: its layer was released, or it was never pushed here"
        )

    def drop(self, layer: int) -> None:
        self._saved = {number: saved for number, saved in self._saved.items() if saved.layer != layer}

    def drop_all(self) -> None:
        self._saved.clear()


class LayerMoves:
    """The moves of a layer's memory, which come one after the other. keys: the blocks that it has saved so far."""

    def __init__(self, activations: Activations, keys: Iterable[int] = ()) -> None:
        self._activations = activations
        self.keys = keys
        self.state = "not_offloaded"

    def start_offload(self) -> None:
        self.require("start_offload", "not_offloaded")
        self._activations.act(Offload(key) for key in self.keys)
        self.state = "offload_started"

    def release(self) -> None:
        self.require("release_activation_forward_gpu_memory", "offload_started")
        self._activations.act(Release(key) for key in self.keys)
        self.state = "offload_finished"

    def start_reload(self) -> None:
        self.require("start_reload", "offload_finished")
        self._activations.act(Reload(key) for key in self.keys)
        self.state = "reload_started"

    def require(self, move: str, *states: str) -> None:
        """Raises RuntimeError unless the state is one of `states`."""
        if self.state not in states:
            raise RuntimeError(f"Invalid state: {self.state} for {move}, must be one of {list(states)}")


def mark_not_offload(*tensors: Any) -> None:
    """These tensors stay on the device, with all that shares their memory, for as long as that memory lives.

    A tensor that was saved already stays too, unless its copy has begun. Of tensors made of parts, all parts stay.
    Takes tensors, Transformer Engine's storage classes, and None, which is ignored. Raises TypeError for anything
    else.
    """
    for tensor in tensors:
        for part in plain_tensors(tensor):
            mark_stays(part)


def mark_activation_offload(*tensors: Any) -> None:
    """Only checks its arguments: every large tensor is offloaded, unless it is marked not to be.

    It does not undo mark_not_offload, whichever comes first.
    """
    start_offload(*tensors)


def start_offload(*tensors: Any, offload_base_tensor: bool = False) -> None:
    """With offload_base_tensor, a view moves with the whole of its base tensor, in one copy.

    Otherwise it only checks its arguments: copies start when the layer ends, for then all its results are ready.
    """
    for tensor in tensors:
        for part in plain_tensors(tensor):
            if offload_base_tensor and part._base is not None:
                mark_whole(part)


def is_cpu_offload_enabled() -> bool:
    """Whether tensors that this thread's operations save now go through an offload context.

    It asks autograd itself. So it is False inside a checkpoint inside the context, whose own hooks come first.
    """
    return is_packing()


def device_of(stream: torch.Stream | None) -> str | None:
    """The device of a stream; without one, None for the accelerator that there is, or the cpu."""
    if stream is not None:
        return str(stream.device)
    return None if torch.accelerator.is_available() else "cpu"

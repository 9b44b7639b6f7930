"""Single tensors of a layer: pushed and popped by number, moved by hand, and marked by the user.

A mark lies on the tensor's memory and holds for every view of it.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable
from typing import Any

import torch

from ..activations.driver import Activations
from ..activations.hooks import ForwardPass, SavedTensor, is_packing
from ..activations.movable import mark_stays, mark_whole
from ..ground.wrappers import plain_tensors, take_apart
from ..policies.base import Offload, Release, Reload

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

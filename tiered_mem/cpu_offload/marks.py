"""Marks on single tensors. A mark lies on the tensor's memory and holds for every view of it."""

from __future__ import annotations

from typing import Any

from ..activations.forward_pass import is_packing
from ..activations.movable import mark_stays, mark_whole
from ..wrappers import plain_tensors


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
    for tensor in tensors:
        for _ in plain_tensors(tensor):
            pass


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

"""Tensors that are spread over several processes: what all of these know alike."""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

import torch


class Spread(NamedTuple):
    """How a DTensor lies over processes: which these are, and what part of it each of them has."""

    mesh: Any
    placements: tuple[Any, ...]


def spread_of(tensor: torch.Tensor) -> Spread | None:
    """None for a tensor that is no DTensor."""
    dtensor = _dtensor(tensor)
    return None if dtensor is None else Spread(dtensor.device_mesh, tuple(dtensor.placements))


def largest_share(tensor: torch.Tensor) -> int:
    """The elements that one process has, where that are most: in all processes the same number."""
    spread = spread_of(tensor)
    if spread is None:
        return tensor.numel()
    shape = list(tensor.shape)
    for size, placement in zip(spread.mesh.shape, spread.placements, strict=True):
        if (dim := getattr(placement, "dim", None)) is not None:
            shape[dim] = -(-shape[dim] // size)
    return math.prod(shape)


def local_shape(tensor: torch.Tensor) -> torch.Size:
    """The shape of what this process has."""
    dtensor = _dtensor(tensor)
    return tensor.shape if dtensor is None else dtensor.to_local().shape


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of it. For a DTensor all of its processes have to call this."""
    dtensor = _dtensor(tensor)
    return tensor if dtensor is None else dtensor.full_tensor()


def _dtensor(tensor: torch.Tensor) -> Any:
    # Importing it takes longer than all the rest of the package. Who has a DTensor has imported it.
    module = sys.modules.get("torch.distributed.tensor")
    return tensor if module is not None and isinstance(tensor, module.DTensor) else None

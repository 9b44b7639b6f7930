"""A slab of host memory as torch sees it, and the forms of the tensors that are cut out of it."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..allocators.base import ALIGNMENT, Region

_log = logging.getLogger("tiered_mem.host_tier")


class HostSlab:
    """A slab of the pool as torch sees it.

    memory: that of a slab which is not of the pool, and lives as long as this.
    """

    def __init__(self, region: Region, memory: torch.Tensor | None = None) -> None:
        self.region = region
        self.pooled = memory is None
        # One storage for the whole slab: torch looks at where a storage starts to tell whether it is pinned.
        whole = bytes_of(region) if memory is None else memory
        self.pinned = memory is None and is_pinned(whole)
        self._elements = {torch.uint8: whole}
        self._cuts: dict[int, tuple[Sequence[Form], list[torch.Tensor]]] = {}  # by their start

    def cut(self, start: int, wanted: Sequence[Form]) -> list[torch.Tensor]:
        """Tensors of these forms side by side, each in whole units of the pool's, from the byte `start` on.

        They may be those of an earlier call: each step of a training asks for much the same.
        """
        known = self._cuts.get(start)
        if known is not None and known[0] == wanted:
            return known[1]
        tensors = []
        last: torch.dtype | None = None
        end = start
        for nbytes, dtype, shape, stride in wanted:
            if dtype is not last:
                last, elements = dtype, self._of(dtype)
                first = elements.storage_offset()  # from which as_strided does not count
            tensors.append(elements.as_strided(shape, stride, first + end // dtype.itemsize))
            end += -(-nbytes // ALIGNMENT) * ALIGNMENT
        if len(self._cuts) >= _MOST_CUTS:
            self._cuts.clear()
        self._cuts[start] = wanted, tensors
        return tensors

    def _of(self, dtype: torch.dtype) -> torch.Tensor:
        """The slab's bytes as a 1-dimensional tensor."""
        known = self._elements.get(dtype)
        if known is None:
            whole = self._elements[torch.uint8]
            with torch.inference_mode(False):
                known = whole[: len(whole) // dtype.itemsize * dtype.itemsize].view(dtype)
            self._elements[dtype] = known
        return known


# A step of a large model cuts some hundred times; of one with changing shapes little comes again.
_MOST_CUTS = 1024


class Form(NamedTuple):
    """How a tensor lies in memory; `stride` is in elements. Bytes are copied as a contiguous one, on both sides."""

    nbytes: int
    dtype: torch.dtype
    shape: Sequence[int]
    stride: Sequence[int]


def flat_form(nbytes: int, dtype: torch.dtype = torch.uint8) -> Form:
    """The bytes as a 1-dimensional tensor."""
    return Form(nbytes, dtype, (nbytes // dtype.itemsize,), (1,))


def room_for(wanted: Sequence[Form]) -> int:
    """The bytes of slots next to each other, each in whole units of the pool's."""
    return sum([-(-size // ALIGNMENT) for size, *_ in wanted]) * ALIGNMENT


def bytes_of(region: Region) -> torch.Tensor:
    """The region as a 1-dimensional uint8 tensor. It does not keep the region alive."""
    with torch.inference_mode(False):  # later copies to it may be made outside of the mode
        return torch.frombuffer((ctypes.c_char * region.nbytes).from_address(region.ptr), dtype=torch.uint8)


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether torch takes the memory for pinned. Where it cannot tell, its copies do not rely on it either."""
    try:
        return tensor.is_pinned()
    except RuntimeError as error:
        _log.warning("torch cannot tell whether host memory is pinned, and it counts as not pinned: %s", str(error))
        return False

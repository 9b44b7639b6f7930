"""Which tensors of an optimizer's states are nobody else's."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any

import torch

from ..wrappers import plain_tensors
from .layout import Movable, Pieces
from .leaves import contents


class OwnTensors(Movable):
    """Moves only tensors whose memory nothing else refers to that the optimizer has.

    An optimizer may have a state that is a view of a larger tensor which it keeps elsewhere, or that is the
    parameter itself. It would go on with the other one, and not with what was moved and brought back.
    """

    _shared: Set[tuple[int, int]] = frozenset()
    _flats: Set[int] = frozenset()

    def look(self, holders: Iterable[Any], flats: Iterable[torch.Tensor]) -> None:
        """Finds out what is shared now.

        holders: states, parameters, and whatever else has tensors. flats: the memory of buckets on the device, in
        which tensors lie side by side.
        """
        self._flats = {_storage(flat) for flat in flats}
        ranges = [
            self._range(part)
            for holder in holders
            for value in contents(holder)
            if isinstance(value, torch.Tensor)
            for part in plain_tensors(value)
            if part.layout is torch.strided and part.nbytes
        ]
        ranges.sort()
        shared = set()
        last = (-1, -1, -1)
        for each in ranges:
            if each[0] == last[0] and each[1] < last[2]:
                shared |= {each[:2], last[:2]}
            last = max(last, each, key=lambda one: (one[0], one[2]))
        self._shared = shared

    def __call__(self, value: object) -> Pieces | None:
        pieces = super().__call__(value)
        return pieces if pieces is not None and all(map(self._alone, pieces.tensors)) else None

    def _alone(self, tensor: torch.Tensor) -> bool:
        whole = tensor.untyped_storage().nbytes() == tensor.nbytes
        return (whole or _storage(tensor) in self._flats) and self._range(tensor)[:2] not in self._shared

    def _range(self, tensor: torch.Tensor) -> tuple[int, int, int]:
        """The storage, and the bytes of it that the tensor is about: all of them, but for a bucket's memory."""
        storage = _storage(tensor)
        if storage not in self._flats:
            return storage, 0, max(tensor.untyped_storage().nbytes(), 1)
        start = int(tensor.storage_offset()) * tensor.element_size()
        return storage, start, start + tensor.nbytes


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)

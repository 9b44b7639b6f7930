"""How the tensors of a parameter's state lie in the bytes of a bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..device import Device
from ..wrappers import Rebuild, take_apart
from .leaves import Path, leaves
from .sharding import largest_share, local_shape, spread_of

# The caching allocators hand out memory at such addresses, and kernels may rely on it.
_ALIGNMENT = 512


class Field(NamedTuple):
    """One tensor of a state, plain or a wrapper, as a DTensor is.

    path: where it is in the state. parts: the plain tensors that it consists of. rebuild: makes a wrapper of them;
    None for a plain tensor. kind: differs between wrappers that `rebuild` does not make of one another's parts.
    """

    path: Path
    parts: tuple[Part, ...]
    rebuild: Rebuild | None
    kind: object

    def after(self, start: int) -> Field:
        """The same, so many bytes further on."""
        return self._replace(parts=tuple(part._replace(offset=part.offset + start) for part in self.parts))

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensor over a bucket's bytes, 1-dimensional uint8 of any device."""
        tensors = [part.of(flat) for part in self.parts]
        return tensors[0] if self.rebuild is None else self.rebuild(tensors)


class Part(NamedTuple):
    """A plain tensor without gaps; `offset` and `nbytes` are those of its bytes in the bucket."""

    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.offset : self.offset + self.nbytes].view(self.dtype).as_strided(self.shape, self.stride)

    @property
    def end(self) -> int:
        """Where the next part may begin."""
        return self.offset + _padded(self.nbytes)


def fields_of(state: Mapping[Any, Any], movable: Movable, start: int) -> tuple[Field, ...]:
    """Where the tensors of a state that can move are to lie, from byte `start` on."""
    fields = []
    for path, value in leaves(state):
        pieces = movable(value)
        if pieces is None:
            continue
        parts = []
        for piece in pieces.tensors:
            parts.append(Part(start, piece.nbytes, piece.dtype, piece.shape, piece.stride()))
            start = parts[-1].end
        fields.append(Field(path, tuple(parts), pieces.rebuild, pieces.kind))
    return tuple(fields)


class Layout(NamedTuple):
    """What a parameter's state takes in a bucket: the fields, from its beginning on, and `room` bytes."""

    fields: tuple[Field, ...]
    room: int


def layout_of(param: torch.Tensor, state: Mapping[Any, Any], movable: Movable) -> Layout:
    """That of a state. Keeps none of its tensors."""
    fields = fields_of(state, movable, 0)
    return Layout(fields, _room_for(param, state, fields, movable.device))


def _room_for(param: torch.Tensor, state: Mapping[Any, Any], fields: Sequence[Field], device: Device) -> int:
    """Of a DTensor, the bytes in the process that has most of it.

    All processes come to the same number, even one whose part of the tensor is empty. So their buckets have the
    same parameters, and a collective operation in one's step meets the same one in the others'.
    """
    if spread_of(param) is None:
        return fields[-1].parts[-1].end if fields else 0
    room = 0
    for _, value in leaves(state):
        if isinstance(value, torch.Tensor) and device.owns(value):
            like = param if spread_of(value) is None and value.shape == local_shape(param) else value
            room += _padded(largest_share(like) * value.element_size())
    return room


class Pieces(NamedTuple):
    """The plain tensors that a tensor consists of, and what makes such a tensor of others. See `Field`."""

    tensors: Sequence[torch.Tensor]
    rebuild: Rebuild | None
    kind: object


class Movable:
    """Tells what a state's value consists of; None for what stays where it is.

    That are values which are no tensors, step counters on the CPU and whatever else is not on the device, empty
    tensors, sparse ones, and those with gaps or in a format of the device's own.
    """

    def __init__(self, device: Device) -> None:
        self.device = device

    def __call__(self, value: object) -> Pieces | None:
        if not isinstance(value, torch.Tensor):
            return None
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            return Pieces([value.detach()], None, None) if _moves(value, self.device) else None
        apart = take_apart(value)
        if apart is None:
            return None
        parts = [part for part in apart.parts if part is not None]
        if len(parts) < len(apart.parts) or not parts or not all(_moves(part, self.device) for part in parts):
            return None
        return Pieces(parts, apart.rebuild, (type(value), value.shape, spread_of(value)))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a plain tensor without gaps, as a 1-dimensional uint8 view."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _moves(tensor: torch.Tensor, device: Device) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.nbytes > 0
        and device.owns(tensor)
        and not tensor.is_conj()
        and not tensor.is_neg()
        and _without_gaps(tensor)
        and device.plain_layout(tensor)
    )


def _without_gaps(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT

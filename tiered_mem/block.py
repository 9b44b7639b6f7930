"""A block: the bytes of one storage, and where they are now."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import torch

from .tiers import DeviceSlot, HostSlot
from .transfer import Ticket


class Place(enum.Enum):
    """Where a block's bytes are. A block goes round: DEVICE, LEAVING, HOST, ARRIVING, DEVICE."""

    DEVICE = "device"
    LEAVING = "leaving"  # still on the device, a copy to the host is under way or done
    HOST = "host"
    ARRIVING = "arriving"  # a copy to the device is under way or done, nobody has waited for it yet
    GONE = "gone"


@dataclass(slots=True, eq=False)
class Block:
    """The bytes of one storage, or of the span of it that a small view covers.

    span: which storage, first byte in it, number of bytes; it names the block while it is on the device.
    ticket: the newest copy between `device` and `host`.
    unwanted: a copy to the host that may still read `device`, though nobody needs its outcome any more.
    versions: tensors over the device bytes, each with the version at which its contents were the block's.
    changed: the device bytes were changed in place between a save and the release.
    holders: saved tensors that still need the block.
    """

    key: int
    span: tuple[int, int, int]
    device: DeviceSlot | None
    host: HostSlot | None = None
    ticket: Ticket | None = None
    unwanted: Ticket | None = None
    place: Place = Place.DEVICE
    versions: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    changed: bool = False
    holders: int = 0

    @property
    def nbytes(self) -> int:
        return self.span[2]

    def unchanged(self) -> bool:
        return not self.changed and all(tensor._version == version for tensor, version in self.versions)


@dataclass(frozen=True, slots=True)
class View:
    """How a saved tensor lies in its block; `offset` and `stride` are in elements."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensor over the block's bytes, given as a 1-dimensional uint8 tensor."""
        return flat.view(self.dtype).as_strided(self.shape, self.stride, self.offset)


def span_of(tensor: torch.Tensor) -> tuple[int, int, int]:
    """The block that a tensor lies in: storage, first byte, number of bytes.

    It is the whole storage, shared with every other view of it, unless the tensor covers less than half of it:
    then it is what lies between its first and its last element.
    """
    itemsize = tensor.element_size()
    storage = tensor.untyped_storage()
    whole = storage.nbytes() // itemsize * itemsize
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    if reach * itemsize * 2 < whole:
        return storage._cdata, int(tensor.storage_offset()) * itemsize, reach * itemsize
    return storage._cdata, 0, whole


def flat_bytes(tensor: torch.Tensor, span: tuple[int, int, int]) -> torch.Tensor:
    """The bytes of a span of the tensor's own storage, as a 1-dimensional uint8 view of it."""
    itemsize = tensor.element_size()
    _, first, nbytes = span
    return tensor.detach().as_strided((nbytes // itemsize,), (1,), first // itemsize).view(torch.uint8)


def view_of(tensor: torch.Tensor, span: tuple[int, int, int]) -> View:
    """How the tensor lies in the block of that span."""
    offset = int(tensor.storage_offset()) - span[1] // tensor.element_size()
    return View(tensor.dtype, tensor.shape, tensor.stride(), offset)

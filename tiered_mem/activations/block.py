"""A block: the bytes of one storage, and where they are now; and the blocks that exist."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..device.device import Device, Stream
from ..device.torch_private import storage_id, storage_uses
from ..device.transfer import Ticket
from ..policies.places import Place, Placed, Places
from ..spill.lower_tier import Job, Record
from ..tiers.host_tier import Form, HostSlot, Lease, flat_form
from .movable import moves_whole

# Which storage, the first byte in it, and the number of bytes.
Span = tuple[int, int, int]


# The autograd node that made a tensor, and which of its outputs the tensor is; None for a leaf.
Origin = tuple[str, int] | None


class Block(Placed):
    """The bytes of one storage, or of the span of it that a small view covers.

    span: names the block while it is on the device.
    form: the tensor that its bytes are copied as. It is the first saved tensor, where that is all of them and
        contiguous, or else a flat one.
    tensor: over the device bytes, in that form if `formed`; None where they are not on the device.
    stream: whose work makes and uses them.
    retained: the bytes in `host` stay there when the block is reloaded.
    ticket: the newest copy between the device and `host`.
    stored: where the bytes are on disk. They are the same for as long as this is set.
    move: the file operation that the block takes part in.
    unwanted: a copy to the host that may still read the device bytes, though nobody needs its outcome any more.
    versions: the tensors that were saved, or the one that was reloaded, over the device bytes, each with the
        version at which its contents were the block's.
    holders: saved tensors that still need the block.
    changed: the device bytes were changed in place between a save and the release.
    chosen, due: a copy to the host is about to begin, and the device memory is to be given up as soon as it has.
    offloaded, left: a copy to the host was begun, the device memory was given up, at least once.
    no_room: it was to be offloaded, and the host tier had no room.
    saver: the graph and the layer that saved it last.
    """

    __slots__ = (
        *("span", "form", "formed", "tensor", "stream", "host", "ticket", "stored", "move", "unwanted"),
        *("versions", "holders", "changed", "chosen", "due", "offloaded", "left", "no_room", "saver"),
        "retained",
    )

    def __init__(self, key: int, span: Span, form: Form | None, tensor: torch.Tensor, stream: Stream) -> None:
        self.key = key
        self.nbytes = span[2]
        self.place = Place.DEVICE
        self.sinking = self.rising = self.stuck = False  # as Placed has them, without a call for each block
        self.span = span
        self.formed = form is not None
        self.form = form or flat_form(self.nbytes, tensor.dtype)
        self.tensor: torch.Tensor | None = tensor
        self.stream = stream
        self.host: HostSlot | None = None
        self.ticket: Ticket | None = None
        self.stored: Stored | None = None
        self.move: Move | None = None
        self.unwanted: Ticket | None = None
        self.versions: list[tuple[torch.Tensor, int]] = []
        self.holders = 0
        self.saver = (0, 0)
        self.changed = self.chosen = self.due = self.offloaded = self.left = self.no_room = self.retained = False

    def unchanged(self) -> bool:
        for tensor, version in self.versions:  # all() would take three times as long
            if tensor._version != version:
                return False
        return not self.changed

    def contents(self) -> torch.Tensor:
        """The device bytes in the block's form. Raises RuntimeError where they are elsewhere."""
        tensor = self.tensor
        if tensor is None:
            raise RuntimeError(f"block {self.key} is not on the device")
        if self.formed:
            return tensor
        return tensor.as_strided(self.form.shape, self.form.stride, self.span[1] // tensor.element_size())


class SavedBlocks(Places[Block]):
    """All blocks that a saved tensor still needs. One thread at a time.

    by_span: those whose device bytes can be saved once more.
    saved, saved_bytes: key and size of the blocks that were saved since they were last taken, and the sum.
    ended, ended_bytes: of those that nobody needs any more.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._current_stream = device.current_stream
        self._keys = itertools.count()
        self.by_span: dict[Span, Block] = {}
        self.saved: list[tuple[int, int]] = []
        self.saved_bytes = 0
        self.ended: list[int] = []
        self.ended_bytes = 0

    def save(self, tensor: torch.Tensor) -> tuple[Block, View]:
        """The block of the tensor's storage, held once more, and how the tensor lies in it.

        It is a new block if none holds the same contents.
        """
        storage, nbytes, dtype = tensor.untyped_storage(), tensor.nbytes, tensor.dtype
        whole = nbytes == storage.nbytes() and tensor.is_contiguous()
        if whole:
            span, offset = (storage_id(storage), 0, nbytes), 0
        else:
            span = span_of(tensor)
            offset = int(tensor.storage_offset()) - span[1] // dtype.itemsize
        version = tensor._version
        detached = tensor.detach()
        # Form(...) and View(...) would each call a Python function more, for each tensor that is saved.
        form = tuple.__new__(Form, (nbytes, dtype, tensor.shape, tensor.stride()))
        block = self.by_span.get(span)
        if block is None or block.versions[-1][1] != version or not block.unchanged():
            block = Block(next(self._keys), span, form if whole else None, detached, self._current_stream())
            self.by_key[block.key] = self.by_span[span] = block
            self.resident += block.nbytes
        number = len(block.versions)
        block.holders += 1
        block.versions.append((detached, version))
        nbytes = block.nbytes
        self.saved.append((block.key, nbytes))
        self.saved_bytes += nbytes
        node = tensor.grad_fn
        origin = None if node is None else (node.name(), tensor.output_nr)
        return block, tuple.__new__(View, (form, offset, number, origin))

    def take_saved(self) -> tuple[tuple[int, int], ...]:
        saved, self.saved, self.saved_bytes = tuple(self.saved), [], 0
        return saved

    def take_ended(self) -> tuple[int, ...]:
        ended, self.ended, self.ended_bytes = tuple(self.ended), [], 0
        return ended


def held_by_others(blocks: Iterable[Block]) -> list[Block]:
    """Those whose storages somebody beside backward has, so that to release them would free nothing.

    blocks: with all that are spans of one storage.
    """
    on_device = [(block, block.tensor.untyped_storage()) for block in blocks if block.tensor is not None]
    own: dict[int, int] = {}
    for block, storage in on_device:
        own.setdefault(storage_id(storage), 1)  # Python's own object
        own[storage_id(storage)] += len(block.versions)
    return [block for block, s in on_device if storage_uses(storage_id(s)) > own[storage_id(s)]]


class View(NamedTuple):
    """How a saved tensor lies in its block; `offset` is in elements.

    number: which of the block's saved tensors it is. origin: names it in errors.
    """

    form: Form
    offset: int
    number: int
    origin: Origin

    def of(self, contents: torch.Tensor) -> torch.Tensor:
        """The tensor over the block's bytes, which are given as a contiguous tensor with its own storage."""
        _, dtype, shape, stride = self.form
        typed = contents if contents.dtype is dtype else contents.view(-1).view(dtype)
        return typed.as_strided(shape, stride, self.offset)


def span_of(tensor: torch.Tensor) -> Span:
    """The bytes that move with a tensor: which storage, first byte, number of bytes.

    It is the whole storage, shared with every other view of it, unless the tensor covers less than half of it:
    then it is what lies between its first and its last element.
    """
    storage, itemsize = tensor.untyped_storage(), tensor.element_size()
    whole = storage.nbytes() // itemsize * itemsize
    if tensor.is_contiguous():
        reach = tensor.numel()
    else:
        reach = 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):  # sum() would take twice as long
            reach += (size - 1) * stride
    if reach * itemsize * 2 < whole and not moves_whole(storage):
        return storage_id(storage), int(tensor.storage_offset()) * itemsize, reach * itemsize
    return storage_id(storage), 0, whole


def origin_of(tensor: torch.Tensor) -> Origin:
    """By what autograd names the tensor in its errors."""
    node = tensor.grad_fn
    return None if node is None else (node.name(), tensor.output_nr)


@dataclass(slots=True, eq=False)
class Shared:
    """A record, and how many blocks and reads need it."""

    record: Record
    users: int = 0


@dataclass(slots=True, eq=False)
class Stored:
    """Where a block is on disk: in which record, and which piece of it. unreadable: a read of it has failed."""

    shared: Shared
    index: int
    unreadable: bool = False


class Move:
    """A file operation that blocks take part in."""

    __slots__ = ()


class Member(NamedTuple):
    """A block of a file operation, the slot that it is written from or read into, and what keeps that meanwhile."""

    block: Block
    slot: HostSlot
    lease: Lease


@dataclass(slots=True, eq=False)
class Write(Move):
    """Blocks that go into one record, once the copies to the host have ended that fill their slots."""

    members: list[Member]
    nbytes: int
    copies: list[Ticket]
    record: Record | None = None


@dataclass(slots=True, eq=False)
class Read(Move):
    """Blocks that come back from one record."""

    members: list[Member]
    job: Job
    shared: Shared

"""Storages that are away, and the host memory that holds their bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from ..device import Event
from ..host_tier import HostSlot
from ..interrupts import uninterrupted
from .placeholder import away, bring_back
from .storages import HeldStorage

# Where the host memory of a storage waits for the next cycle: on the storage. New gradients come with new storages,
# so that theirs waits on the parameter's.
_COPIES = "_tiered_mem_copies"


@dataclass(eq=False)
class Parked:
    """One storage that is away. Its tensors keep it, and not the other way round.

    marks: the attributes of the storage.
    owner: kept alive meanwhile.
    parameter: gives the parameter whose gradient it is, or None.
    orphaned: its manager was closed, and there was no room on the device.
    """

    copy: HostCopy
    nbytes: int
    dtype: torch.dtype
    marks: dict[str, Any]
    owner: object
    parameter: Callable[[], torch.Tensor | None]
    tensors: list[TensorWeakRef] = field(default_factory=list)
    orphaned: bool = False

    @property
    def advice(self) -> str:
        if self.orphaned:
            return "its manager was closed when the device had no room for it. Free some, and call manager.reload()"
        return "call manager.reload(module) before it is used"

    def restore(self, flat: torch.Tensor) -> None:
        """Makes its tensors views of new device memory, all of which `flat` covers."""
        vars(flat.untyped_storage()).update(self.marks)
        for reference in self.tensors:
            tensor = reference()
            if tensor is not None:
                bring_back(tensor, flat)


@dataclass(eq=False)
class HostCopy:
    """Host memory for the bytes of one storage, from one cycle to the next.

    unused: the list that takes its slot when nobody can want it any more.
    event: the end of a copy that reads it.
    """

    slot: HostSlot
    unused: deque[tuple[HostSlot, Event | None]]
    event: Event | None = None
    given_up: bool = False

    def give_up(self) -> None:
        if not self.given_up:
            self.given_up = True
            self.unused.append((self.slot, self.event))

    @uninterrupted
    def __del__(self) -> None:
        self.give_up()


def kept_copy(held: HeldStorage) -> HostCopy | None:
    """The host memory that waits for a storage's next cycle, or for a gradient in its place."""
    return _kept_copies(held).get(_place(held))


def keep_copy(held: HeldStorage, copy: HostCopy) -> None:
    """Makes this host memory wait for the storage's next cycle."""
    _kept_copies(held)[_place(held)] = copy


def _kept_copies(held: HeldStorage) -> dict[int, HostCopy]:
    parameter = held.members[0].parameter
    attributes: dict[str, Any]
    if parameter is None:
        attributes = vars(held.storage)
    elif (known := away(parameter)) is None:
        attributes = vars(parameter.untyped_storage())
    else:
        attributes = known.home.marks if isinstance(known.home, Parked) else {}
    copies: dict[int, HostCopy] = attributes.setdefault(_COPIES, {})
    return copies


def _place(held: HeldStorage) -> int:
    """The key under which the host memory waits: -1 is the storage's own, others are a parameter's offset."""
    parameter = held.members[0].parameter
    if parameter is None:
        return -1
    known = away(parameter)
    return known.offset if known is not None else int(parameter.storage_offset())

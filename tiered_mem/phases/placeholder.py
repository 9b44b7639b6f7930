"""Tensors whose bytes are away from the device: they keep their shape, and any use raises Offloaded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

from ..device.device import Event
from ..device.torch_private import AsPlainTensors, part_here
from ..errors import Offloaded
from ..ground.harmless import GET_GRADIENT, HARMLESS, OF_SHAPE, SET_GRADIENT
from ..ground.interrupts import uninterrupted
from ..tiers.host_tier import HostSlot


@dataclass(frozen=True, slots=True)
class WayBack:
    """What a tensor that is away remembers. It keeps the bytes alive.

    name: such as "layers.0.weight of GPT".
    kind: its type.
    shape: a tensor without memory, of the same shape and strides.
    offset: where it begins in its storage, in elements.
    guard: keeps a gradient from being added to it.
    """

    name: str
    kind: type[torch.Tensor]
    shape: torch.Tensor
    offset: int
    parked: Parked
    guard: RemovableHandle | None

    def refusal(self) -> Offloaded:
        """What whoever uses the tensor gets."""
        return Offloaded(f"{self.name} is offloaded: {self.parked.advice}")


@dataclass(eq=False)
class Parked:
    """One storage that is away. Its tensors keep it, and not the other way round.

    marks: the attributes of the storage.
    owner: kept alive meanwhile.
    parameter: the one whose gradient it is, or None.
    orphaned: its manager was closed, and there was no room on the device.
    """

    copy: HostCopy
    tensors: list[TensorWeakRef]
    marks: dict[str, Any]
    owner: object
    parameter: TensorWeakRef | None
    orphaned: bool = False

    @property
    def advice(self) -> str:
        """How the user gets the tensors back."""
        if self.orphaned:
            return "its manager was closed when the device had no room for it. Free some, and call manager.reload()"
        return "call manager.reload(module) before it is used"

    def restore(self, flat: torch.Tensor) -> None:
        """Makes its tensors views of new device memory, all of which `flat` covers."""
        vars(flat.untyped_storage()).update(self.marks)
        for reference in self.tensors:
            if (tensor := reference()) is not None:
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
    dropped: bool = False

    def drop(self) -> None:
        """Idempotent."""
        if not self.dropped:
            self.dropped = True
            self.unused.append((self.slot, self.event))

    @uninterrupted
    def __del__(self) -> None:
        self.drop()


class _Refusing:
    """Raises Offloaded for every operation, and for everything that shows its contents."""

    _tiered_mem_away: WayBack

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in HARMLESS or func == GET_GRADIENT or (func == SET_GRADIENT and args[1] is None):
            with AsPlainTensors():
                return func(*args, **kwargs)
        if func in OF_SHAPE and not kwargs.get("out"):
            return func(args[0]._tiered_mem_away.shape, *args[1:], **kwargs)
        raise next(_all_away((args, kwargs))).refusal()

    def __repr__(self, *, tensor_contents: object = None) -> str:
        away = self._tiered_mem_away
        return f"<{away.name}, {away.shape.dtype} of shape {tuple(away.shape.shape)}, offloaded>"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)


class AwayTensor(_Refusing, torch.Tensor):  # type: ignore[misc]
    """A buffer or a gradient that is away."""


class AwayParameter(_Refusing, torch.nn.Parameter):  # type: ignore[misc]
    """A parameter that is away. Optimizers and modules keep the very object."""


class _RefusingDTensor(_Refusing):
    """A DTensor also raises where it goes round torch's functions: in methods of its own, and below Python."""

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise next(_all_away((args, kwargs or {}))).refusal()

    def _refuse(self, *args: object, **kwargs: object) -> Any:
        raise self._tiered_mem_away.refusal()

    to_local = full_tensor = redistribute = __tensor_flatten__ = __get_tensor_shard__ = _refuse


_AWAY: dict[type[torch.Tensor], type[torch.Tensor]] = {
    torch.Tensor: AwayTensor,
    torch.nn.Parameter: AwayParameter,
}


def can_go(tensor: torch.Tensor) -> bool:
    """Whether a tensor of this type can be away. Of a DTensor that is about itself, and not about its part here."""
    kind = type(tensor)
    if kind not in _AWAY and kind.__name__ == "DTensor" and part_here(tensor) is not None:
        _AWAY[kind] = type("AwayDTensor", (_RefusingDTensor, kind), {})
    return kind in _AWAY


def away(tensor: torch.Tensor) -> WayBack | None:
    """What a tensor that is away remembers; None for any other tensor."""
    return tensor._tiered_mem_away if isinstance(tensor, _Refusing) else None


def send_away(tensor: torch.Tensor, name: str, parked: Parked) -> None:
    """Takes the device memory from a tensor whose bytes are parked. The tensor stays the same object.

    A DTensor has no memory itself: its part here goes with it.
    """
    kind = type(tensor)
    shape = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    known = WayBack(name, kind, shape, int(tensor.storage_offset()), parked, _guard(tensor, name, parked))
    if part_here(tensor) is None:
        with torch.inference_mode(tensor.is_inference()):
            # Below Python nothing asks this class, as where a saved-tensor hook kept the tensor. A shape (0,) would
            # broadcast with a last dimension of 1, and the result might pass for right.
            tensor.data = torch.empty((0,) * 8, dtype=tensor.dtype, device=tensor.device)
    tensor.__class__ = _AWAY[kind]
    tensor._tiered_mem_away = known  # type: ignore[attr-defined]


def bring_back(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    """Gives a tensor that is away its place in new memory, all of which `flat` covers.

    flat: 1-dimensional, of the dtype of one of the tensors in that memory with the smallest elements.
    """
    known: WayBack = tensor._tiered_mem_away  # type: ignore[attr-defined]
    tensor.__class__ = known.kind
    del tensor._tiered_mem_away  # type: ignore[attr-defined]
    if known.guard is not None:
        known.guard.remove()
    if part_here(tensor) is not None:
        return
    size, stride = known.shape.size(), known.shape.stride()
    if tensor.is_inference():
        with torch.inference_mode():  # a view would be an inference tensor no more
            empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            tensor.data = empty.set_(flat.untyped_storage(), known.offset, size, stride)
        return
    with torch.inference_mode(False), torch.no_grad():
        if flat.dtype is not tensor.dtype:
            flat = flat[: flat.nbytes // tensor.itemsize * tensor.itemsize // flat.itemsize].view(tensor.dtype)
        tensor.data = flat.as_strided(size, stride, known.offset)


def _guard(tensor: torch.Tensor, name: str, parked: Parked) -> RemovableHandle | None:
    """A hook for graphs that only add to the tensor's gradient: nothing else would tell them."""
    if not tensor.requires_grad:
        return None

    def refuse(_gradient: torch.Tensor) -> None:
        raise Offloaded(f"{name} is offloaded, and a backward computes its gradient: {parked.advice}")

    return tensor.register_hook(refuse)  # type: ignore[no-untyped-call, no-any-return]


def _all_away(thing: object) -> Iterator[WayBack]:
    """The tensors that are away among a function's arguments."""
    if isinstance(thing, _Refusing):
        yield thing._tiered_mem_away
    elif isinstance(thing, (dict, list, tuple)):
        for each in thing.values() if isinstance(thing, dict) else thing:
            yield from _all_away(each)

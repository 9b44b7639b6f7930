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
from ..device.torch_private import AsPlainTensors
from ..errors import Offloaded
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
        if func in _HARMLESS or (func == _SET_GRADIENT and args[1] is None):
            with AsPlainTensors():
                return func(*args, **kwargs)
        if func in _OF_SHAPE and not kwargs.get("out"):
            return func(args[0]._tiered_mem_away.shape, *args[1:], **kwargs)
        known = next(_all_away((args, kwargs)))
        raise Offloaded(f"{known.name} is offloaded: {known.parked.advice}")

    def __repr__(self, *, tensor_contents: object = None) -> str:
        away = self._tiered_mem_away
        return f"<{away.name}, {away.shape.dtype} of shape {tuple(away.shape.shape)}, offloaded>"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)


class AwayTensor(_Refusing, torch.Tensor):  # type: ignore[misc]
    """A buffer or a gradient that is away."""


class AwayParameter(_Refusing, torch.nn.Parameter):  # type: ignore[misc]
    """A parameter that is away. Optimizers and modules keep the very object."""


_AWAY: dict[type[torch.Tensor], type[torch.Tensor]] = {
    torch.Tensor: AwayTensor,
    torch.nn.Parameter: AwayParameter,
}


def can_go(tensor: torch.Tensor) -> bool:
    """Whether a tensor of this type can be away."""
    return type(tensor) in _AWAY


def away(tensor: torch.Tensor) -> WayBack | None:
    """What a tensor that is away remembers; None for any other tensor."""
    return tensor._tiered_mem_away if isinstance(tensor, _Refusing) else None


def send_away(tensor: torch.Tensor, name: str, parked: Parked) -> None:
    """Takes the device memory from a tensor whose bytes are parked. The tensor stays the same object."""
    kind = type(tensor)
    shape = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    known = WayBack(name, kind, shape, int(tensor.storage_offset()), parked, _guard(tensor, name, parked))
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


_T: Any = torch.Tensor
_SET_GRADIENT = _T.grad.__set__
# What torch still knows of the tensor, and what can be said of it before it is back.
_HARMLESS = frozenset(
    [
        *(each.__get__ for each in (_T.requires_grad, _T.is_leaf, _T.grad_fn, _T.retains_grad, _T.grad)),
        *(_T.requires_grad.__set__, _T.requires_grad_, _T.register_hook, _T.register_post_accumulate_grad_hook),
        *(each.__get__ for each in (_T.dtype, _T.device, _T.layout, _T.is_cpu, _T.is_cuda, _T.is_sparse)),
        *(_T.is_floating_point, _T.is_complex, _T.is_inference, torch.is_floating_point, torch.is_complex),
    ]
)
# What only its shape says.
_OF_SHAPE = frozenset(
    [
        *(each.__get__ for each in (_T.shape, _T.ndim, _T.nbytes, _T.itemsize)),
        *(_T.size, _T.stride, _T.is_contiguous, _T.dim, _T.ndimension, _T.__len__),
        *(_T.numel, _T.nelement, torch.numel, _T.element_size),
    ]
)

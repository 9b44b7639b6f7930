"""Tensors that tell somebody before they are used."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

import torch

from ..device.torch_private import AsPlainTensors
from ..ground.harmless import HARMLESS, OF_SHAPE
from .layout import spread_of


class Guard(Protocol):
    """Hears of a use."""

    def asked(self, tensor: torch.Tensor, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """`function`, of torch, is about to be called with `args`, and the tensor is among them.

        Returns when it may be, and raises what whoever calls it is to get.
        """

    def shape_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """What has the tensor's shape, and is asked for that in its place."""


class _Guarded:
    """Asks its guard before each operation that looks at the elements, and before all that shows them."""

    _tiered_mem_guard: Guard

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in OF_SHAPE and isinstance(args[0], _Guarded) and not kwargs.get("out"):
            args = (args[0]._tiered_mem_guard.shape_of(cast(torch.Tensor, args[0])), *args[1:])
        elif func not in HARMLESS:
            for tensor in list(_all_guarded((args, kwargs))):
                if (guard := guard_of(tensor)) is not None:  # the one before may have ended it
                    guard.asked(tensor, func, args)
        with AsPlainTensors():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # torch takes the type before it looks at the elements.
        self._tiered_mem_guard.asked(cast(torch.Tensor, self), _deepcopy, (self, memo))
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._tiered_mem_guard.asked(cast(torch.Tensor, self), _reduce, (self, protocol))
        return self.__reduce_ex__(protocol)


class GuardedTensor(_Guarded, torch.Tensor):
    """A gradient with a guard."""


class GuardedParameter(_Guarded, torch.nn.Parameter):
    """A parameter with a guard. Optimizers and modules keep the very object."""


_deepcopy: Callable[..., Any] = torch.Tensor.__deepcopy__
_reduce: Callable[..., Any] = torch.Tensor.__reduce_ex__
_GUARDED: dict[type[torch.Tensor], type[torch.Tensor]] = {
    torch.Tensor: GuardedTensor,
    torch.nn.Parameter: GuardedParameter,
}
_PLAIN = {guarded: plain for plain, guarded in _GUARDED.items()}


def can_guard(tensor: torch.Tensor) -> bool:
    """Whether a tensor of this type can have a guard. What uses a DTensor's part has none."""
    kind = type(tensor)
    if kind not in _GUARDED and kind not in _PLAIN and spread_of(tensor) and kind.__name__ == "DTensor":
        _GUARDED[kind] = guarded = type("GuardedDTensor", (_Guarded, kind), {})
        _PLAIN[guarded] = kind
    return kind in _GUARDED or kind in _PLAIN


def guard_of(tensor: torch.Tensor) -> Guard | None:
    """The guard that a tensor has."""
    return tensor._tiered_mem_guard if isinstance(tensor, _Guarded) else None


def put_guard(tensor: torch.Tensor, guard: Guard) -> None:
    """Gives the guard to a tensor, which stays the same object."""
    tensor.__class__ = _GUARDED.get(type(tensor), type(tensor))
    tensor._tiered_mem_guard = guard  # type: ignore[attr-defined]


def end_guard(tensor: torch.Tensor) -> None:
    """The tensor is as it was before it had a guard. Idempotent."""
    plain: Any = _PLAIN.get(type(tensor))
    if plain is not None:
        tensor.__class__ = plain
        del tensor._tiered_mem_guard  # type: ignore[attr-defined]


def _all_guarded(thing: object) -> Iterator[torch.Tensor]:
    """The tensors with guards among a function's arguments."""
    if isinstance(thing, _Guarded):
        yield thing  # type: ignore[misc]
    elif isinstance(thing, (dict, list, tuple)):
        for each in thing.values() if isinstance(thing, dict) else thing:
            yield from _all_guarded(each)

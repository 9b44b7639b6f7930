"""Tensors that are made of other tensors: quantized ones, DTensor, and whatever follows one of two protocols."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

Parts = Sequence[torch.Tensor | None]
Rebuild = Callable[[Parts], torch.Tensor]


class Apart(NamedTuple):
    """The tensors that a wrapper consists of, and a function that makes such a wrapper of them again.

    handle: a second handle of the wrapper, without its parts. It counts the wrapper's in-place changes, which the
        parts do not. None where the type keeps no such count.
    """

    parts: Parts
    rebuild: Rebuild
    handle: torch.Tensor | None


def take_apart(tensor: torch.Tensor) -> Apart | None:
    """A wrapper's parts; None for other types, and for a wrapper whose parts cannot be taken out.

    Known are Transformer Engine's protocol (prepare_for_saving and restore_from_saved) and PyTorch's
    (__tensor_flatten__ and __tensor_unflatten__). The wrapper itself is left as it is.
    """
    kind: Any = type(tensor)
    if hasattr(kind, "prepare_for_saving") and hasattr(kind, "restore_from_saved"):
        return _by_transformer_engine(tensor)
    # A tensor that a collective is still filling says so by trigger_wait: its parts are not ready to be read.
    if hasattr(kind, "__tensor_flatten__") and not hasattr(kind, "trigger_wait"):
        return _by_pytorch(tensor)
    return None


def plain_tensors(thing: Any) -> Iterator[torch.Tensor]:
    """The plain tensors that a tensor, or a storage class of Transformer Engine's, consists of; itself if plain.

    Empty for None. Raises TypeError for anything else.
    """
    parts: Parts
    if thing is None:
        return
    if hasattr(type(thing), "prepare_for_saving"):
        # It takes the parts out of the object, and they are to stay there.
        parts, emptied = thing.prepare_for_saving()
        emptied.restore_from_saved(list(parts))
    elif hasattr(type(thing), "__tensor_flatten__"):
        parts = [part for name in thing.__tensor_flatten__()[0] if _is_tensor(part := getattr(thing, name))]
    elif isinstance(thing, torch.Tensor):
        yield thing
        return
    else:
        raise TypeError(f"{thing!r} is no tensor, and does not say of which it consists")
    for part in parts:
        yield from plain_tensors(part)


def copied(tensor: torch.Tensor, device: str | torch.device | None = None) -> torch.Tensor:
    """A copy in memory of its own, on the device that is named, or on the tensor's.

    A wrapper's parts are copied: its type need not know how to copy, and may give back the same memory.
    """
    apart = take_apart(tensor)
    if apart is not None:
        return apart.rebuild([None if part is None else copied(part, device) for part in apart.parts])
    whole = tensor.detach()
    return whole.clone() if device is None else whole.to(device, copy=True)


def _by_transformer_engine(tensor: Any) -> Apart:
    # prepare_for_saving takes the parts out of the object it is called on: here that is a second handle.
    parts, empty = tensor.detach().prepare_for_saving()

    def rebuild(parts: Parts) -> torch.Tensor:
        empty.restore_from_saved(list(parts))
        filled: torch.Tensor = empty.detach()
        empty.prepare_for_saving()  # or the parts would live as long as the graph
        return filled

    return Apart(parts, rebuild, None)


def _by_pytorch(tensor: Any) -> Apart | None:
    names, context = tensor.__tensor_flatten__()
    kind, shape, stride = type(tensor), tensor.shape, tensor.stride()
    found = {name: getattr(tensor, name) for name in names}
    # What is no tensor, as the mesh of a DTensor, is no part: it goes into the new wrapper as it is.
    others = {name: thing for name, thing in found.items() if not _is_tensor(thing)}
    parts = {name: thing for name, thing in found.items() if name not in others}
    handle = tensor.detach()
    if handle is tensor:
        return None
    try:
        for name in parts:
            setattr(handle, name, None)
    except AttributeError:
        return None
    part_names = list(parts)

    def rebuild(parts: Parts) -> torch.Tensor:
        inner = others | dict(zip(part_names, parts, strict=True))
        whole: torch.Tensor = kind.__tensor_unflatten__(inner, context, shape, stride)
        return whole

    return Apart(list(parts.values()), rebuild, handle)


def _is_tensor(thing: object) -> bool:
    return isinstance(thing, torch.Tensor)

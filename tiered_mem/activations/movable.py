"""Which saved tensors may move, and which stay on the device, and why."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import cast

import torch
from torch.autograd.graph import Node

from ..device.device import Device
from ..device.torch_private import is_of_transform, storage_id
from ..ground.stats import REASONS, Moved, Reason
from ..ground.wrappers import plain_tensors
from ..sizes import format_bytes

_log = logging.getLogger("tiered_mem.activations")

# A user's marks lie on the storage of a tensor. So they hold for every view of it, for the copies of the handle
# that autograd makes, and for as long as the memory lives, without a list of tensors anywhere.
STAYS = "_tiered_mem_stays"
_WHOLE = "_tiered_mem_whole"

# min_bytes falls by this factor, where all that is smaller may be so large a part of what is missing; at most to
# the size of which host memory is made. In steps that are small it would come too late for the first forward.
_STEP = 16
_WORTH = 4
_LEAST_BYTES = 4 << 10


class Movable:
    """Judges saved tensors for the layers of one model.

    A tensor stays if it is small, lives on another device, is marked to stay, belongs to a weight or a buffer of
    the layers, or is more than its bytes: sparse, nested, quantized by torch itself, conjugate or negative.

    others: modules whose weights and buffers, but not those of the modules inside them, stay too.
    min_bytes, min_elements: what is smaller than either stays.
    stayed: counts what does.
    lacks: gives the bytes that the device lacks if so many come that stay, though all leaves that can. min_bytes
        falls then, where that may help. None: it is what it is.
    """

    def __init__(
        self,
        device: Device,
        layers: Sequence[torch.nn.Module],
        stayed: Stayed,
        *,
        others: Sequence[torch.nn.Module] = (),
        min_bytes: int = 1,
        min_elements: int = 1,
        lacks: Callable[[int], int] | None = None,
    ) -> None:
        self.stayed = stayed
        self._lacks = lacks
        self._torch_device = device.torch_device
        # Not the modules themselves: a model whose forward keeps this would be kept by it.
        self._places = [[_places_of(module) for module in layer.modules()] for layer in layers]
        self._places += [[_places_of(module)] for module in others]
        self.min_bytes = min_bytes
        self._min_elements = min_elements
        self._known: tuple[object, ...] | None = None
        self._weights: frozenset[int] = frozenset()

    def adapt(self, small: int, layers: int, left: int) -> bool:
        """A layer has ended. Whether min_bytes is less from now on.

        small: the bytes that it has saved below min_bytes. layers, left: how many a forward has, and still to come.
        """
        if self._lacks is None or self.min_bytes <= _LEAST_BYTES or not small:
            return False
        missing = self._lacks(small * left)
        if missing and _WORTH * small * layers >= missing:
            self.min_bytes = max(_LEAST_BYTES, self.min_bytes // _STEP)
            _log.info(
                "min_bytes is %s from now on: the device lacks %s, and a layer has saved %s in smaller tensors",
                *map(format_bytes, (self.min_bytes, missing, small)),
            )
            return True
        return False

    def weights(self) -> frozenset[int]:
        """The storages of the layers' weights and buffers."""
        # To look at every weight in each forward would cost more than all else there: whoever replaces weights
        # replaces the first of a layer.
        known = tuple(_identity(next(_weights_in(places), None)) for places in self._places)
        if known != self._known:
            self._known = known
            self._weights = frozenset(
                storage_id(part.untyped_storage())
                for places in self._places
                for tensor in _weights_in(places)
                for part in plain_tensors(tensor)
                if has_storage(part)
            )
        return self._weights

    def large(self, tensor: torch.Tensor) -> bool:
        """Whether it is worth a copy, and on the right device. What there is cheap to ask."""
        return (
            tensor.layout is torch.strided
            and not tensor.is_nested
            and tensor.nbytes >= self.min_bytes
            and tensor.numel() >= self._min_elements
            and tensor.device == self._torch_device
            and not is_of_transform(tensor)
        )

    def moves(self, tensor: torch.Tensor, weights: frozenset[int]) -> bool:
        """Whether a plain tensor may move that is strided and not below min_bytes. Counts those that stay.

        weights: the storages of those that are known. They do not count.
        """
        if (
            tensor.device == self._torch_device
            and tensor.numel() >= self._min_elements
            and not is_of_transform(tensor)
        ):
            storage = tensor.untyped_storage()
            if storage_id(storage) in weights:
                return False
            if (
                not tensor.is_quantized
                and storage.nbytes() >= self.min_bytes  # a broadcast tensor is large, and its storage is not
                and not hasattr(storage, STAYS)
                and not tensor.is_conj()
                and not tensor.is_neg()
            ):
                base = tensor if tensor._base is None else tensor._base
                node = base.grad_fn
                if node is None:
                    # isinstance() alone would call a Python function, Parameter's metaclass has one.
                    weight = type(base) is not torch.Tensor and isinstance(base, torch.nn.Parameter)
                else:
                    weight = node.name() == _CAST and _casts_weight(node)
                if not weight:
                    return True
        self.note_stay(tensor)
        return False

    def note_stay(self, tensor: torch.Tensor) -> None:
        """Counts a tensor that is not `large`, or does not `moves`. Weights are nobody's to move."""
        if is_weight(tensor):
            return
        whole = has_storage(tensor)
        self.stayed.add(self._reason(tensor, whole), tensor.nbytes if whole else 0)

    def _reason(self, tensor: torch.Tensor, whole: bool) -> Reason:
        if tensor.device != self._torch_device:
            return "other_device"
        if not whole or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            return "kind"
        return "marked" if stays(tensor.untyped_storage()) else "small"


WORDS: dict[Reason, str] = {
    "small": "in tensors below min_bytes",
    "outside": "saved outside the layers of the context: name more of them",
    "other_device": "on another device than the manager's: move the model there, or make the manager for its own",
    "kind": "in tensors that are more than their bytes, such as quantized or conjugate ones",
    "marked": "marked to stay",
    "no_room": "for which the host tier had no room: raise host_bytes",
    "policy": "left there by the policy",
}


_ELSEWHERE = (
    "nothing of what the layers saved came to tiered_mem: hooks inside of them have it, such as those of "
    'torch.autograd.graph.save_on_cpu() or activation_checkpointing_kwargs={"offload": True}. Leave those out'
)
_NOT_CALLED = (
    "none of the layers was called, and nothing moves: a whole model that ran compiled before has none any more. "
    "Compile the layers, or call torch.compiler.reset() and attach the model, or enter the context, before it runs"
)
_REPLACED = (
    "none of the layers was called, and nothing moves: the model has others in their place. Attach it, or make the "
    "context, after its layers were replaced"
)


class Stayed:
    """Counts the bytes that one context's forwards save and that stay, and says once where most of them stay.

    totals: those of the manager, by reason, to which each forward adds its own when it ends.
    silent: it says nothing of what the policy could have moved, as the user or a plan chooses that.
    replaced: whether the model has no layer any more of those that it had.
    """

    def __init__(
        self,
        totals: dict[Reason, Moved],
        *,
        silent: bool = False,
        replaced: Callable[[], bool] = lambda: False,
    ) -> None:
        self._totals = totals
        self._replaced = replaced
        self._said = False
        self._silent = silent
        self._now: dict[Reason, Moved] = {reason: Moved() for reason in REASONS}

    def of(self, reason: Reason) -> Moved:
        """What stays in this forward for the reason. Whoever has many tensors to count counts them there."""
        return self._now[reason]

    def add(self, reason: Reason, nbytes: int) -> None:
        """A tensor stays."""
        self._now[reason].add(nbytes)

    def take_back(self, reason: Reason, nbytes: int) -> None:
        """One that was added moves after all."""
        self._now[reason].take_back(nbytes)

    def forward_ends(self, moved: int | None, *, layers: int = 1, elsewhere: bool = False) -> None:
        """moved: how many bytes of what it has saved have left, or are leaving; None if it was broken off.

        layers: how many were called. elsewhere: other hooks have what these saved.
        """
        stayed: dict[Reason, int] = {}
        for reason, now in self._now.items():
            stayed[reason] = now.nbytes
            self._totals[reason].count += now.count
            self._totals[reason].nbytes += now.nbytes
            now.count = now.nbytes = 0
        if moved is None or self._said:
            return
        saved = moved + sum(stayed.values())
        if elsewhere or (saved and not layers):
            self._said = True
            _log.warning(_ELSEWHERE if elsewhere else _REPLACED if self._replaced() else _NOT_CALLED)
            return
        silent = self._silent and stayed["other_device"] * 2 <= saved
        if silent or moved * 2 >= saved:
            return
        self._said = True
        why = [
            f"{format_bytes(nbytes)} {WORDS[reason]}"
            for reason, nbytes in sorted(stayed.items(), key=lambda item: item[1], reverse=True)
            if nbytes > 0
        ]
        _log.warning(
            "of %s that a forward saved for backward, %s. On the device stay %s",
            format_bytes(saved),
            f"{format_bytes(moved)} move" if moved else "nothing moves",
            ", ".join(why),
        )


def mark_stays(tensor: torch.Tensor) -> None:
    """The tensor's storage stays on the device, where it has not begun to leave it."""
    setattr(tensor.untyped_storage(), STAYS, True)


def mark_whole(tensor: torch.Tensor) -> None:
    """The tensor's storage moves as a whole, however little of it a saved view covers."""
    setattr(tensor.untyped_storage(), _WHOLE, True)


def stays(storage: torch.UntypedStorage) -> bool:
    return hasattr(storage, STAYS)


def moves_whole(storage: torch.UntypedStorage) -> bool:
    return hasattr(storage, _WHOLE)


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether the tensor lies in one storage of its own device, as sparse, nested and functorch's own do not."""
    return tensor.layout is torch.strided and not tensor.is_nested and not is_of_transform(tensor)


# Where a module has its own parameters, and its buffers.
_Places = tuple[dict[str, torch.Tensor | None], dict[str, torch.Tensor | None]]


def _places_of(module: torch.nn.Module) -> _Places:
    return cast(_Places, (module._parameters, module._buffers))


def _weights_in(places: Iterable[_Places]) -> Iterator[torch.Tensor]:
    for parameters, buffers in places:
        for tensor in (*parameters.values(), *buffers.values()):
            if tensor is not None:
                yield tensor


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def _identity(tensor: torch.Tensor | None) -> object:
    """Differs when the tensor is another one, or has other memory."""
    if tensor is None:
        return None
    if type(tensor) in _PLAIN and has_storage(tensor):
        return id(tensor), storage_id(tensor.untyped_storage())
    parts = (part for part in plain_tensors(tensor) if has_storage(part))
    return id(tensor), *(storage_id(part.untyped_storage()) for part in parts)


def is_weight(tensor: torch.Tensor) -> bool:
    """Whether it is a parameter, or a view of one, or autocast's copy of one."""
    base = tensor if tensor._base is None else tensor._base
    node = base.grad_fn
    if node is None:
        return isinstance(base, torch.nn.Parameter)
    return node.name() == _CAST and _casts_weight(node)


# Autograd's name for a tensor that autocast, or a `to`, has made in another type.
_CAST = "ToCopyBackward0"


def _casts_weight(cast: Node) -> bool:
    """Autocast keeps the low-precision copies of weights until it is left: to move one frees nothing."""
    source = cast.next_functions[0][0]
    return isinstance(getattr(source, "variable", None), torch.nn.Parameter) and _in_autocast()


def _in_autocast() -> bool:
    # Where tensors are saved, inside an operation that autocast took over, torch.is_autocast_enabled() says no.
    # The depth of the nesting tells.
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth > 1

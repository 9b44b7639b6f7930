"""Which saved tensors may move, and which stay on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch.autograd.graph import Node

from ..device import Device
from ..stats import Reason
from ..wrappers import plain_tensors
from .marks import STAYS, stays
from .stayed import Stayed


class Movable:
    """Judges saved tensors for the layers of one model.

    A tensor stays if it is small, lives on another device, is marked to stay, belongs to a weight or a buffer of
    the layers, or is more than its bytes: sparse, nested, quantized by torch itself, conjugate or negative.

    min_bytes, min_elements: what is smaller than either stays.
    stayed: counts what does.
    """

    def __init__(
        self,
        device: Device,
        layers: Sequence[torch.nn.Module],
        stayed: Stayed,
        *,
        min_bytes: int = 1,
        min_elements: int = 1,
    ) -> None:
        self.stayed = stayed
        self._torch_device = device.torch_device
        self._layers = [list(layer.modules()) for layer in layers]
        self.min_bytes = min_bytes
        self._min_elements = min_elements
        self._known: tuple[object, ...] | None = None
        self._weights: frozenset[int] = frozenset()

    def weights(self) -> frozenset[int]:
        """The storages of the layers' weights and buffers."""
        # To look at every weight in each forward would cost more than all else there: whoever replaces weights
        # replaces the first of a layer.
        known = tuple(_identity(next(_weights_of(modules), None)) for modules in self._layers)
        if known != self._known:
            self._known = known
            self._weights = frozenset(
                part.untyped_storage()._cdata
                for modules in self._layers
                for tensor in _weights_of(modules)
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
            and not _is_functorch_wrapped(tensor)
        )

    def moves(self, tensor: torch.Tensor, weights: frozenset[int]) -> bool:
        """Whether a plain tensor may move. Counts those that stay, but for weights.

        weights: the storages of those that are known.
        """
        if (
            tensor.layout is torch.strided
            and not tensor.is_nested
            and tensor.nbytes >= self.min_bytes
            and tensor.numel() >= self._min_elements
            and tensor.device == self._torch_device
            and not _is_functorch_wrapped(tensor)
        ):
            storage = tensor.untyped_storage()
            if storage._cdata in weights:
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
        if _is_weight(tensor):
            return
        whole = has_storage(tensor)
        self.stayed.add(self._reason(tensor, whole), tensor.nbytes if whole else 0)

    def _reason(self, tensor: torch.Tensor, whole: bool) -> Reason:
        if tensor.device != self._torch_device:
            return "other_device"
        if not whole or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            return "kind"
        return "marked" if stays(tensor.untyped_storage()) else "small"


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether the tensor lies in one storage of its own device, as sparse, nested and functorch's own do not."""
    return tensor.layout is torch.strided and not tensor.is_nested and not _is_functorch_wrapped(tensor)


# What torch.func.vmap and jvp make of a tensor.
_is_functorch_wrapped: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor


def _weights_of(modules: Iterable[torch.nn.Module]) -> Iterator[torch.Tensor]:
    for module in modules:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                yield tensor


def _identity(tensor: torch.Tensor | None) -> object:
    """Differs when the tensor is another one, or has other memory."""
    if tensor is None:
        return None
    parts = (part for part in plain_tensors(tensor) if has_storage(part))
    return id(tensor), *(part.untyped_storage()._cdata for part in parts)


def _is_weight(tensor: torch.Tensor) -> bool:
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

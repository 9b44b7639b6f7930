"""Which saved tensors may move, and which stay on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .device import Device
from .marks import stays
from .parts import plain_tensors

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Movable:
    """Judges saved tensors for the layers of one model.

    A tensor stays if it is small, lives on another device, is marked to stay, belongs to a weight or a buffer of
    the layers, or is more than its bytes: sparse, conjugate or negative.

    min_bytes, min_elements: what is smaller than either stays.
    """

    def __init__(
        self, device: Device, layers: Sequence[torch.nn.Module], *, min_bytes: int = 1, min_elements: int = 1
    ) -> None:
        self._device = device
        self._torch_device = device.torch_device
        # Module.parameters() would look for them anew, which takes a millisecond for a model of ten layers.
        self._modules = list(dict.fromkeys(module for layer in layers for module in layer.modules()))
        self._min_bytes = min_bytes
        self._min_elements = min_elements

    def weights(self) -> frozenset[int]:
        """The storages of the layers' weights and buffers as they are now."""
        tensors = (
            tensor
            for module in self._modules
            for tensor in (*module._parameters.values(), *module._buffers.values())
            if tensor is not None
        )
        return frozenset(
            part.untyped_storage()._cdata
            for tensor in tensors
            for part in ((tensor,) if type(tensor) in _PLAIN else plain_tensors(tensor))
        )

    def large(self, tensor: torch.Tensor) -> bool:
        """Whether it is worth a copy, and on the right device. What there is cheap to ask."""
        return (
            tensor.layout is torch.strided
            and tensor.nbytes >= self._min_bytes
            and tensor.numel() >= self._min_elements
            and tensor.device == self._torch_device
        )

    def moves(self, tensor: torch.Tensor, storage: torch.UntypedStorage, weights: frozenset[int]) -> bool:
        """Whether a large plain tensor may move."""
        return (
            storage._cdata not in weights
            and storage.nbytes() >= self._min_bytes  # a broadcast tensor is large, and its storage is not
            and not stays(storage)
            and not tensor.is_conj()
            and not tensor.is_neg()
            and not self._is_weight(tensor)
        )

    def _is_weight(self, tensor: torch.Tensor) -> bool:
        base = tensor if tensor._base is None else tensor._base
        if isinstance(base, torch.nn.Parameter):
            return True
        return torch.is_autocast_enabled(self._device.kind) and _is_cast_of_weight(base)


def _is_cast_of_weight(tensor: torch.Tensor) -> bool:
    """Autocast keeps the low-precision copies of weights until it is left: to move one frees nothing."""
    node = tensor.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return False
    source = node.next_functions[0][0]
    return isinstance(getattr(source, "variable", None), torch.nn.Parameter)

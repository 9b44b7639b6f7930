"""Tensors that are kept in parts, as quantized training keeps them: the tests' own, small and slow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

BLOCK = 32
LARGEST = 448.0  # of e4m3: 1.75 * 2**8


class MXFP8Parts:
    """The four tensors that an MXFP8 tensor consists of, and how they are taken out of it and put back.

    Data are the bits of e4m3 numbers as uint8 of the tensor's shape. Each block of 32 of them, along the last
    dimension row-wise and along all others column-wise, has a scale: the bits of an e8m0 number as uint8.
    """

    _rowwise_data: torch.Tensor | None
    _columnwise_data: torch.Tensor | None
    _rowwise_scale_inv: torch.Tensor | None
    _columnwise_scale_inv: torch.Tensor | None

    def get_data_tensors(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The data, row-wise and column-wise."""
        return self._rowwise_data, self._columnwise_data

    def parts(self) -> list[torch.Tensor | None]:
        return [self._rowwise_data, self._columnwise_data, self._rowwise_scale_inv, self._columnwise_scale_inv]

    def prepare_for_saving(self) -> tuple[list[torch.Tensor | None], MXFP8Parts]:
        """The parts, and this object without them."""
        parts = self.parts()
        self._set_parts([None] * len(parts))
        return parts, self

    def restore_from_saved(self, tensors: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Takes its parts from the front of the list and returns what is left."""
        self._set_parts(tensors[:4])
        return tensors[4:]

    def dequantize(self) -> torch.Tensor:
        """The numbers, in bfloat16."""
        if self._rowwise_data is None or self._rowwise_scale_inv is None:
            raise ValueError("the row-wise parts are not there")
        return _decode(self._rowwise_data, self._rowwise_scale_inv)

    def _set_parts(self, parts: list[torch.Tensor | None]) -> None:
        self._rowwise_data, self._columnwise_data, self._rowwise_scale_inv, self._columnwise_scale_inv = parts


class MXFP8Storage(MXFP8Parts):
    """The parts in an object that is no tensor, for use inside one autograd function."""

    def __init__(self, parts: list[torch.Tensor | None]) -> None:
        self._set_parts(parts)


class MXFP8Tensor(MXFP8Parts, torch.Tensor):
    """A tensor for autograd and everybody else; any operation but detach() works on its dequantized numbers."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, parts: list[torch.Tensor | None], shape: torch.Size, device: torch.device) -> MXFP8Tensor:
        tensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bfloat16, device=device)
        tensor._set_parts(parts)
        return tensor

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].parts(), args[0].shape, args[0].device)
        return func(*_plain(args), **_plain(kwargs or {}))

    def __repr__(self) -> str:
        return f"MXFP8Tensor(shape={tuple(self.shape)})"


class MXFP8Quantizer:
    """Quantizes a tensor whose last size is a multiple of 32, and so is the product of the others."""

    def __call__(self, tensor: torch.Tensor) -> MXFP8Tensor:
        return MXFP8Tensor(self._parts(tensor), tensor.shape, tensor.device)

    def storage(self, tensor: torch.Tensor) -> MXFP8Storage:
        return MXFP8Storage(self._parts(tensor))

    def _parts(self, tensor: torch.Tensor) -> list[torch.Tensor | None]:
        tensor = tensor.detach()
        data, scale = _encode(tensor)
        columns, column_scale = _encode(tensor.flatten(0, -2).t())
        return [data, columns.t().contiguous().view(tensor.shape), scale, column_scale]


class TwoParts(torch.Tensor):
    """A float32 tensor as a bfloat16 and what that leaves over. It is taken apart by PyTorch's protocol."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    high: torch.Tensor
    low: torch.Tensor

    @staticmethod
    def __new__(cls, high: torch.Tensor, low: torch.Tensor) -> TwoParts:
        tensor = torch.Tensor._make_wrapper_subclass(cls, high.shape, dtype=torch.float32, device=high.device)
        tensor.high, tensor.low = high, low
        return tensor

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TwoParts:
        high = tensor.bfloat16()
        return cls(high, (tensor - high).bfloat16())

    def dequantize(self) -> torch.Tensor:
        return self.high.float() + self.low.float()

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["high", "low"], None

    @staticmethod
    def __tensor_unflatten__(
        parts: dict[str, torch.Tensor], context: None, size: torch.Size, stride: tuple[int, ...]
    ) -> TwoParts:
        return TwoParts(parts["high"], parts["low"])

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].high, args[0].low)
        return func(*_plain(args), **_plain(kwargs or {}))

    def __repr__(self) -> str:
        return f"TwoParts(shape={tuple(self.shape)})"


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that it consists of: itself, if it is plain."""
    if isinstance(tensor, MXFP8Tensor):
        return [part for part in tensor.parts() if part is not None]
    return [tensor.high, tensor.low] if isinstance(tensor, TwoParts) else [tensor]


def bits(tensor: torch.Tensor) -> list[torch.Tensor]:
    """All that the tensor consists of, on the CPU."""
    return [part.cpu() for part in parts_of(tensor)]


def same_bits(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(some, others, strict=True)
    )


def _plain(arguments: Any) -> Any:
    return tree_map_only((MXFP8Tensor, TwoParts), lambda tensor: tensor.dequantize(), arguments)


def _encode(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 bits of the tensor's shape, and an e8m0 scale for each block of the last dimension."""
    blocks = tensor.float().unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    scale = (largest / LARGEST).clamp(min=2.0**-126).log2().ceil()
    numbers = blocks / torch.exp2(scale)
    size = numbers.abs().clamp(max=LARGEST)
    # A wrong log2 just below a power of two does no harm: eight steps of one size are sixteen of half that size.
    exponent = size.log2().floor().clamp(min=-6)
    steps = torch.round(size / torch.exp2(exponent - 3))
    data = (exponent + 6) * 8 + steps + (numbers < 0) * 128
    return data.flatten(-2).to(torch.uint8), (scale.squeeze(-1) + 127).to(torch.uint8)


def _decode(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    code = data.float().unflatten(-1, (-1, BLOCK))
    negative = code >= 128
    code = code - negative * 128
    exponent = torch.floor(code / 8)
    steps = code - exponent * 8 + (exponent > 0) * 8
    size = steps * torch.exp2(exponent.clamp(min=1) - 10 + (scale.float() - 127).unsqueeze(-1))
    return (size * (1 - negative * 2.0)).flatten(-2).bfloat16()

"""Products of quantised matrices and what goes with them, made of other operators."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ascend_emulator.aclop_formulas import scatter_update_

# By the numbers with which torch_npu names them.
_DTYPES = {1: torch.int8, 3: torch.int32, 5: torch.float16, 6: torch.float32, 15: torch.bfloat16}


def quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    scale_dtype: int | None = None,
    group_sizes: Sequence[int] | None = None,
    y_scale: Tensor | None = None,
) -> Tensor:
    """Of int8, or of int4 of which eight lie in an int32. A bias of int32 is scaled too."""
    dtypes = (x1_dtype, x2_dtype, pertoken_scale_dtype, scale_dtype)
    if any(dtype is not None for dtype in dtypes) or group_sizes or y_scale is not None or x1.dtype != x2.dtype:
        raise NotImplementedError("the emulated NPU has npu_quant_matmul of int8 or int4 without groups only")
    if x1.dtype not in (torch.int8, torch.int32) or scale.dtype not in (torch.float32, torch.int64, torch.bfloat16):
        raise RuntimeError(f"npu_quant_matmul does not take {x1.dtype} with a scale of {scale.dtype}")
    out = torch.int8 if output_dtype is None else _DTYPES[output_dtype]
    if x1.dtype == torch.int32:
        x1, x2 = unpacked(x1), _unpacked_weight(x2)
    product = (x1.int() @ x2.int()).float()
    if bias is not None and bias.dtype == torch.int32:
        product = product + bias
    if out == torch.int32:
        return product.to(out)
    product = product * _scale_of(scale)
    if pertoken_scale is not None:
        product = product * pertoken_scale.unsqueeze(-1)
    if bias is not None and bias.dtype != torch.int32:
        product = product + bias
    return _quantised(product, offset) if out == torch.int8 else product.to(out)


def _quantised(values: Tensor, offset: Tensor | None) -> Tensor:
    values = values.round() if offset is None else (values + offset).round()
    return values.clamp(-128, 127).to(torch.int8)


def unpacked(packed: Tensor) -> Tensor:
    """Eight signed numbers of each int32, the lowest bits first, along the last dimension."""
    shifts = torch.arange(28, -1, -4, device=packed.device, dtype=torch.int32)
    numbers = torch.bitwise_right_shift(torch.bitwise_left_shift(packed.unsqueeze(-1), shifts), 28)
    return numbers.to(torch.int8).flatten(-2)


def _unpacked_weight(packed: Tensor) -> Tensor:
    """One that is a transposed view is packed along its first dimension."""
    if packed.dim() == 2 and packed.stride(0) == 1 and packed.stride(1) == packed.size(0):
        return unpacked(packed.t()).t()
    return unpacked(packed)


# Where npu_trans_quant_param puts an offset, and that there is none. The scale is the upper 19 bits of a float32.
_OFFSET_BITS, _HAS_SCALE = 37, 1 << 46


def trans_quant_param(scale: Tensor, offset: Tensor | None = None, round_mode: int | None = 0) -> Tensor:
    bits = scale.contiguous().view(torch.int32).long() & 0xFFFFE000
    if offset is None:
        return bits | _HAS_SCALE
    return bits | (offset.round().clamp(-256, 255).long() & 0x1FF) << _OFFSET_BITS | _HAS_SCALE


def _scale_of(scale: Tensor) -> Tensor:
    if scale.dtype != torch.int64:
        return scale.float()
    return (scale & 0xFFFFE000).to(torch.int32).view(torch.float32)


def weight_quant_batchmatmul(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    antiquant_offset: Tensor | None = None,
    quant_scale: Tensor | None = None,
    quant_offset: Tensor | None = None,
    bias: Tensor | None = None,
    antiquant_group_size: int = 0,
    inner_precise: int = 0,
    weight_dtype: int | None = None,
) -> Tensor:
    """A product with a quantised weight, which has a scale for each column, or for each of a group of rows."""
    if quant_scale is not None or weight_dtype is not None or weight.dtype not in (torch.int8, torch.int32):
        raise NotImplementedError(
            "the emulated NPU has npu_weight_quant_batchmatmul of int8 or int4, not quantised again"
        )
    if weight.dtype == torch.int32:
        weight = _unpacked_weight(weight)
    # An Ascend 910B has no vector operations of bfloat16.
    values = weight.to(torch.float16 if x.dtype == torch.float16 else torch.float32)
    for by, of in ((torch.add, antiquant_offset), (torch.mul, antiquant_scale)):
        if of is not None:
            each = of.repeat_interleave(antiquant_group_size, 0) if antiquant_group_size else of
            values = by(values, each.to(values.dtype))
    product = x.float() @ values.to(x.dtype).float()
    return (product if bias is None else product + bias).to(x.dtype)


def anti_quant(
    x: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    dst_dtype: int | None = None,
    src_dtype: int | None = None,
) -> Tensor:
    numbers = (unpacked(x) if x.dtype == torch.int32 else x).float()
    shifted = numbers if offset is None else numbers + offset
    return (shifted * scale).to(torch.float16 if dst_dtype is None else _DTYPES[dst_dtype])


def quant_scatter(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return quant_scatter_(input.clone(), *args, **kwargs)


def quant_scatter_(
    input: Tensor,
    indices: Tensor,
    updates: Tensor,
    quant_scales: Tensor,
    quant_zero_points: Tensor | None = None,
    axis: int = -2,
    quant_axis: int = -1,
    reduce: str = "update",
    dst_type: int | None = None,
    round_mode: str | None = "rint",
) -> Tensor:
    """Puts quantised updates where indices says, as scatter_update does."""
    if dst_type is not None or quant_axis % updates.dim() != updates.dim() - 1:
        raise NotImplementedError("the emulated NPU has npu_quant_scatter to int8, by the last dimension, only")
    values = _quantised(updates.float() / quant_scales.float(), quant_zero_points)
    return scatter_update_(input, indices, values, axis)


QUANTISED_FORMULAS: dict[str, Callable[..., Any]] = {
    "npu::npu_quant_matmul": quant_matmul,
    "npu::npu_trans_quant_param": trans_quant_param,
    "npu::npu_weight_quant_batchmatmul": weight_quant_batchmatmul,
    "npu::npu_anti_quant": anti_quant,
    "npu::npu_quant_scatter": quant_scatter,
    "npu::npu_quant_scatter_": quant_scatter_,
}

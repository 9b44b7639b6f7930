"""Operators of torch_npu that CANN computes by aclop alone, made of others: shapes, parts, and torch's own under
another name."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

_aten = torch.ops.aten


def reshape(input: Tensor, shape: Sequence[int], can_refresh: bool = False) -> Tensor:
    return input.reshape(*shape).clone()


def transpose(input: Tensor, perm: Sequence[int], require_contiguous: bool = True) -> Tensor:
    return input.permute(*perm).clone(memory_format=torch.contiguous_format)


def broadcast(input: Tensor, size: Sequence[int]) -> Tensor:
    return input.expand(*size).clone(memory_format=torch.contiguous_format)


def slice_of(input: Tensor, offsets: Sequence[int], size: Sequence[int]) -> Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, size, strict=True)):
        input = input.narrow(dim, offset, length)
    return input.clone(memory_format=torch.contiguous_format)


def indexing(
    input: Tensor,
    begin: Sequence[int],
    end: Sequence[int],
    strides: Sequence[int],
    begin_mask: int = 0,
    end_mask: int = 0,
    ellipsis_mask: int = 0,
    new_axis_mask: int = 0,
    shrink_axis_mask: int = 0,
) -> Tensor:
    """A slice of each dimension. A dimension's bit in a mask says that its number does not count."""
    if ellipsis_mask or new_axis_mask or shrink_axis_mask:
        raise NotImplementedError(
            "the emulated NPU has npu_indexing without ellipsis_mask, new_axis_mask and shrink_axis_mask only"
        )
    slices = [
        slice(None if begin_mask >> dim & 1 else first, None if end_mask >> dim & 1 else last, stride)
        for dim, (first, last, stride) in enumerate(zip(begin, end, strides, strict=True))
    ]
    return input[tuple(slices)].clone(memory_format=torch.contiguous_format)


def stride_copy(input: Tensor, shape: Sequence[int], stride: Sequence[int], storage_offset: int) -> Tensor:
    return input.as_strided(shape, stride, storage_offset).clone(memory_format=torch.contiguous_format)


def pad_all(input: Tensor, paddings: Sequence[int]) -> Tensor:
    """paddings: before and behind, from the first dimension on; F.pad begins with the last."""
    pairs = [paddings[i : i + 2] for i in range(0, len(paddings), 2)]
    return pad(input, [width for pair in reversed(pairs) for width in pair])


def one_hot(
    input: Tensor, num_classes: int = -1, depth: int = 1, on_value: float = 1, off_value: float = 0
) -> Tensor:
    """num_classes is the new dimension, in spite of its name."""
    is_on = input.unsqueeze(-1) == torch.arange(depth, device=input.device)
    on = torch.full((), on_value, dtype=torch.float32, device=input.device)
    return torch.where(is_on, on, torch.full_like(on, off_value)).movedim(-1, num_classes)


def scatter_update(input: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    return scatter_update_(input.clone(), indices, updates, axis)


def scatter_update_(input: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    """Puts each batch's updates at a place along the axis; indices tells where each one begins."""
    if indices.dim() != 1:
        raise NotImplementedError("the emulated NPU has scatter_update with one index for each batch only")
    along = torch.arange(updates.size(axis), device=input.device).reshape(-1, *[1] * (-1 - axis % -input.dim()))
    places = indices.reshape(-1, *[1] * (input.dim() - 1)) + along
    return input.scatter_(axis, places.expand_as(updates), updates)


def scatter_nd_update(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    return scatter_nd_update_(input.clone(), indices, updates)


def scatter_nd_update_(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    return input.index_put_(indices.long().unbind(-1), updates)


def sort_values(input: Tensor, dim: int = -1, descending: bool = False) -> Tensor:
    return input.sort(dim, descending).values


def extreme(of: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The largest or least of a dimension, with places of int32."""

    def value_and_place(input: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
        values, places = of(input, dim, keepdim)
        return values, places.int()

    return value_and_place


def extreme_backward(grad: Tensor, dim: int, indices: Tensor, sizes: Sequence[int], keepdim: bool) -> Tensor:
    if not keepdim:
        grad, indices = grad.unsqueeze(dim), indices.unsqueeze(dim)
    return grad.new_zeros(*sizes).scatter_(dim, indices.long(), grad)


def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    unused = [0] * len(stride)
    return torch.convolution(input, weight, bias, stride, padding, dilation, False, unused, groups)


def convolution_backward(
    input: Tensor,
    grad: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    unused = [0] * len(stride)
    grads: tuple[Tensor | None, ...] = _aten.convolution_backward(
        grad, input, weight, [weight.size(0)], stride, padding, dilation, False, unused, groups, output_mask
    )
    return grads


def silu_backward(grad: Tensor, input: Tensor, output: Tensor) -> Tensor:
    return _aten.silu_backward(grad, input)  # type: ignore[no-any-return]


def batched_product(input: Tensor, mat2: Tensor, output_sizes: Sequence[int]) -> Tensor:
    product = input @ mat2
    return product.reshape(*output_sizes) if output_sizes else product


def batched_product_backward_1(grad: Tensor, mat1: Tensor, mat2: Tensor, size: Sequence[int]) -> Tensor:
    return (_grad_of_product(grad, mat1, mat2) @ mat2.mT).sum_to_size(*size)


def batched_product_backward_2(grad: Tensor, mat1: Tensor, mat2: Tensor, size: Sequence[int]) -> Tensor:
    return (mat1.mT @ _grad_of_product(grad, mat1, mat2)).sum_to_size(*size)


def _grad_of_product(grad: Tensor, mat1: Tensor, mat2: Tensor) -> Tensor:
    batches = torch.broadcast_shapes(mat1.shape[:-2], mat2.shape[:-2])  # type: ignore[no-untyped-call]
    return grad.reshape(*batches, mat1.size(-2), mat2.size(-1))


ACLOP_FORMULAS: dict[str, Callable[..., Any]] = {
    "npu::npu_format_cast_": torch.Tensor.copy_,
    "npu::npu_reshape": reshape,
    "npu::npu_transpose": transpose,
    "npu::npu_broadcast": broadcast,
    "npu::npu_slice": slice_of,
    "npu::npu_indexing": indexing,
    "npu::npu_stride_copy": stride_copy,
    "npu::npu_pad": pad_all,
    "npu::npu_one_hot": one_hot,
    "npu::scatter_update": scatter_update,
    "npu::scatter_update_": scatter_update_,
    "npu::npu_scatter_nd_update": scatter_nd_update,
    "npu::npu_scatter_nd_update_": scatter_nd_update_,
    "npu::npu_sort_v2": sort_values,
    "npu::npu_min.dim": extreme(torch.min),
    "npu::npu_min_backward": extreme_backward,
    "npu::npu_max.dim": extreme(torch.max),
    "npu::npu_max_backward": extreme_backward,
    "npu::npu_conv2d": convolution,
    "npu::npu_conv3d": convolution,
    "npu::npu_convolution": convolution,
    "npu::npu_conv2d_backward": convolution_backward,
    "npu::npu_conv3d_backward": convolution_backward,
    "npu::npu_convolution_backward": convolution_backward,
    "npu::npu_silu": torch.nn.functional.silu,
    "npu::npu_silu_": _aten.silu_.default,
    "npu::npu_silu_backward": silu_backward,
    "npu::npu_mish": torch.nn.functional.mish,
    "npu::npu_mish_backward": _aten.mish_backward.default,
    "npu::npu_bmmV2": batched_product,
    "npu::npu_bmm_v2_mat1_backward": batched_product_backward_1,
    "npu::npu_bmm_v2_mat2_backward": batched_product_backward_2,
}

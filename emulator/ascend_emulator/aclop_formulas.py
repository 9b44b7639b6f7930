"""Operators of torch_npu that CANN computes by aclop alone, made of others: shapes, parts, and torch's own under
another name."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, pad

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


def slice_into(input: Tensor, offsets: Sequence[int], size: Sequence[int], *, out: Tensor) -> Tensor:
    return out.resize_(list(size)).copy_(slice_of(input, offsets, size))


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


def convolution_transpose(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    padding: Sequence[int],
    output_padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    return torch.convolution(input, weight, bias, stride, padding, dilation, True, output_padding, groups)


def convolution_transpose_backward(
    input: Tensor,
    grad: Tensor,
    weight: Tensor,
    padding: Sequence[int],
    output_padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    biases = [weight.size(1) * groups]
    grads: tuple[Tensor | None, ...] = _aten.convolution_backward(
        grad, input, weight, biases, stride, padding, dilation, True, output_padding, groups, output_mask
    )
    return grads


def layer_norm_eval(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    return layer_norm(input, list(normalized_shape), weight, bias, eps)


def linear_backward(grad: Tensor, input: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return grad @ weight, grad.mT @ input


def softmax_cross_entropy(input: Tensor, labels: Tensor) -> Tensor:
    """labels: how much of each class there is."""
    return -(labels * input.log_softmax(1)).sum(1)


def softmax_cross_entropy_backward(grad: Tensor, input: Tensor, labels: Tensor) -> Tensor:
    return grad.unsqueeze(1) * (input.softmax(1) - labels)


def sign_bits_pack(input: Tensor, size: int) -> Tensor:
    """A bit for each number that is not negative, the first in the lowest; -1 fills the last byte."""
    signs = pad(input, [0, -input.numel() % 8], value=-1.0) >= 0
    weights = 2 ** torch.arange(8, device=input.device)
    return (signs.view(-1, 8) * weights).sum(1).to(torch.uint8).view(size, -1)


def sign_bits_unpack(input: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    shifts = torch.arange(8, device=input.device)
    bits = torch.bitwise_right_shift(input.flatten().int().unsqueeze(1), shifts) & 1
    return (bits * 2 - 1).to(dtype).view(size, -1)


def float_status(input: Tensor, mode: int = 0) -> Tensor:
    """Clear: a number that has become too large is infinite, and this is what a device tells that saturates."""
    if os.environ.get("INF_NAN_MODE_FORCE_DISABLE") == "1":
        raise NotImplementedError(
            "the emulated NPU does not saturate, and has no npu_get_float_status to tell of it"
        )
    return torch.zeros(8, dtype=torch.int32, device=input.device)


def empty_float_status(input: Tensor, mode: int = 0) -> Tensor:
    return torch.zeros(8, dtype=torch.float32, device=input.device)


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
    "npu::npu_slice.out": slice_into,
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
    "npu::npu_convolution_transpose": convolution_transpose,
    "npu::npu_convolution_transpose_backward": convolution_transpose_backward,
    "npu::npu_conv_transpose2d": convolution_transpose,
    "npu::npu_conv_transpose2d_backward": convolution_transpose_backward,
    "npu::npu_conv_transpose3d_backward": convolution_transpose_backward,
    "npu::npu_linear": torch.nn.functional.linear,
    "npu::npu_linear_backward": linear_backward,
    "npu::npu_layer_norm_eval": layer_norm_eval,
    "npu::npu_softmax_cross_entropy_with_logits": softmax_cross_entropy,
    "npu::npu_softmax_cross_entropy_with_logits_backward": softmax_cross_entropy_backward,
    "npu::npu_sign_bits_pack": sign_bits_pack,
    "npu::npu_sign_bits_unpack": sign_bits_unpack,
    "npu::npu_alloc_float_status": empty_float_status,
    "npu::npu_get_float_status": float_status,
    "npu::npu_clear_float_status": empty_float_status,
    "npu::npu_silu": torch.nn.functional.silu,
    "npu::npu_silu_": _aten.silu_.default,
    "npu::npu_silu_backward": silu_backward,
    "npu::npu_mish": torch.nn.functional.mish,
    "npu::npu_mish_backward": _aten.mish_backward.default,
    "npu::npu_bmmV2": batched_product,
    "npu::npu_bmm_v2_mat1_backward": batched_product_backward_1,
    "npu::npu_bmm_v2_mat2_backward": batched_product_backward_2,
}

"""What torch_npu computes by functions of CANN that are not emulated, made of other operators."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ascend_emulator.aclop_formulas import ACLOP_FORMULAS
from ascend_emulator.attention_formulas import ATTENTION_FORMULAS
from ascend_emulator.formats import FORMATS
from ascend_emulator.image_formulas import IMAGE_FORMULAS
from ascend_emulator.quantised_formulas import QUANTISED_FORMULAS
from ascend_emulator.recurrent_formulas import RECURRENT_FORMULAS
from ascend_emulator.sync_batch_norm import SYNC_BATCH_NORM


def confusion_transpose(input: Tensor, perm: Sequence[int], shape: Sequence[int], transpose_first: bool) -> Tensor:
    """Permutes and reshapes, in this order or in the other."""
    if transpose_first:
        return input.permute(*perm).reshape(*shape).clone()
    return input.reshape(*shape).permute(*perm).contiguous().clone()


def confusion_transpose_backward(
    grad: Tensor, perm: Sequence[int], shape: Sequence[int], transpose_first: bool
) -> Tensor:
    """shape: that of the input. transpose_first is the opposite of what it was for the input."""
    back = sorted(range(len(perm)), key=lambda dim: perm[dim])
    if transpose_first:
        return confusion_transpose(grad, back, shape, True)
    return confusion_transpose(grad, back, [shape[dim] for dim in perm], False)


def apply_adam_w(
    beta1_power: float,
    beta2_power: float,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: Tensor,
    max_grad_norm: Tensor | None,
    amsgrad: bool | None,
    maximize: bool | None,
    *,
    out: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """A step of AdamW in place. out: the weights and both moments. The powers are those of the step before."""
    if amsgrad:
        raise NotImplementedError("the emulated NPU has no npu_apply_adam_w with amsgrad, nor has an Ascend 910B")
    weights, mean, square = out
    if maximize:
        grad = -grad
    mean.mul_(beta1).add_(grad, alpha=1 - beta1)
    square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = (square / (1 - beta2_power * beta2)).sqrt_().add_(epsilon)
    weights.mul_(1 - lr * weight_decay).addcdiv_(mean, denominator, value=-lr / (1 - beta1_power * beta1))
    return weights, mean, square


def split_with_sizes_copy(self: Tensor, split_sizes: Sequence[int], dim: int = 0, *, out: Sequence[Tensor]) -> None:
    """FSDP2's way out of an all-gather."""
    parts = self.split_with_sizes(split_sizes, dim)
    for part, to in zip(parts, out, strict=True):
        if to.shape != part.shape:
            to.resize_(part.shape)
    torch._foreach_copy_(list(out), parts)


def chunk_cat(tensors: Sequence[Tensor], dim: int, num_chunks: int, *, out: Tensor) -> Tensor:
    """FSDP2's way into a reduce-scatter: first the first chunk of each, and so on; zeros fill the last."""
    rows = []
    for tensor in tensors:
        missing = -tensor.size(dim) % num_chunks
        whole = pad(tensor, [0] * (2 * (tensor.dim() - dim) - 1) + [missing]) if missing else tensor
        rows.append(whole.reshape(*tensor.shape[:dim], num_chunks, -1))
    if out.dtype == rows[0].dtype:
        return torch.cat(rows, dim + 1, out=out)
    return out.copy_(torch.cat(rows, dim + 1))


FORMULAS: dict[str, Callable[..., Any]] = {
    **ACLOP_FORMULAS,
    **ATTENTION_FORMULAS,
    **FORMATS,
    **IMAGE_FORMULAS,
    **QUANTISED_FORMULAS,
    **RECURRENT_FORMULAS,
    **SYNC_BATCH_NORM,
    "npu::npu_confusion_transpose": confusion_transpose,
    "npu::npu_confusion_transpose_backward": confusion_transpose_backward,
    "npu::npu_apply_adam_w.out": apply_adam_w,
    "aten::split_with_sizes_copy.out": split_with_sizes_copy,
    "aten::_chunk_cat.out": chunk_cat,
}

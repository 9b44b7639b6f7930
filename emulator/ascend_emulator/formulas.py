"""What torch_npu computes by an older interface of CANN, which is not emulated, made of other operators."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


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


FORMULAS: dict[str, Callable[..., Any]] = {
    "npu::npu_confusion_transpose": confusion_transpose,
    "npu::npu_confusion_transpose_backward": confusion_transpose_backward,
    "npu::npu_apply_adam_w.out": apply_adam_w,
}

"""The parts of nn.SyncBatchNorm, between which its ranks exchange sums; by torch's names and by torch_npu's.

Channels are the second dimension. Sums are kept in float32 at least, as on hardware.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def reduce(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Each channel's sum, and the sum of its squares."""
    x = _wide(input)
    return x.sum(_without_channels(x)), x.square().sum(_without_channels(x))


def stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Each channel's mean and 1 / sqrt(variance + eps)."""
    x = _wide(input)
    variance, mean = torch.var_mean(x, _without_channels(x), correction=0)
    return mean, (variance + eps).rsqrt()


def gather_sums(
    input: Tensor,
    sums: Tensor,
    square_sums: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """What stats() is of all ranks together, from each one's reduce(): a row of sums and a count for each rank."""
    total = counts.sum().to(sums.dtype)
    mean = sums.sum(0) / total
    variance = square_sums.sum(0) / total - mean.square()
    _update(running_mean, running_var, mean, variance, total, momentum)
    return mean, (variance + eps).rsqrt()


def gather_stats(
    input: Tensor,
    means: Tensor,
    invstds: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """The same from each one's stats()."""
    each = counts.to(means.dtype).reshape(-1, 1)
    total = each.sum()
    mean = (means * each).sum(0) / total
    variances = invstds.pow(-2) - eps
    variance = ((variances + (means - mean).square()) * each).sum(0) / total
    _update(running_mean, running_var, mean, variance, total, momentum)
    return mean, (variance + eps).rsqrt()


def normalise(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    x = _wide(input)
    result = (x - _by_channel(mean, x)) * _by_channel(invstd, x)
    if weight is not None:
        result = result * _by_channel(weight, x)
    if bias is not None:
        result = result + _by_channel(bias, x)
    return result.to(input.dtype)


def backward_reduce(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """By channel: the sum of gradients, that of gradients times distances, and weight's and bias's gradients."""
    x, grad = _wide(input), _wide(grad_out)
    of_grad = grad.sum(_without_channels(x))
    of_product = (grad * (x - _by_channel(mean, x))).sum(_without_channels(x))
    dtype = of_grad.dtype if weight is None else weight.dtype
    return of_grad, of_product, (of_product * invstd).to(dtype), of_grad.to(dtype)


def backward_normalise(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_of_grad: Tensor,
    sum_of_product: Tensor,
    count: Tensor,
) -> Tensor:
    x, grad = _wide(input), _wide(grad_out)
    total = count.sum().to(x.dtype)
    from_mean = _by_channel(sum_of_grad / total, x)
    from_variance = (x - _by_channel(mean, x)) * _by_channel(invstd.square() * sum_of_product / total, x)
    scale = invstd if weight is None else invstd * weight
    return ((grad - from_mean - from_variance) * _by_channel(scale, x)).to(input.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.element_size() < 4 else x


def _without_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _by_channel(values: Tensor, x: Tensor) -> Tensor:
    return values.to(x.dtype).reshape(1, -1, *[1] * (x.dim() - 2))


def _update(
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    total: Tensor,
    momentum: float,
) -> None:
    if running_mean is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
    if running_var is not None:
        running_var.lerp_((variance * (total / (total - 1))).to(running_var.dtype), momentum)


SYNC_BATCH_NORM: dict[str, Callable[..., Any]] = {
    "aten::batch_norm_stats": stats,
    "aten::batch_norm_gather_stats_with_counts": gather_stats,
    "aten::batch_norm_elemt": normalise,
    "aten::batch_norm_backward_reduce": backward_reduce,
    "aten::batch_norm_backward_elemt": backward_normalise,
    "npu::batch_norm_reduce": reduce,
    "npu::batch_norm_gather_stats_update": gather_sums,
}

"""The parts of SyncBatchNorm: two parts of a batch, for two ranks, against batch norm of the whole on the CPU."""

import pytest
import torch
import torch.nn.functional as F
import torch_npu  # type: ignore[import-untyped]
from torch import Tensor

from emulator.tests.compare import assert_equal, random_inputs

EPS, MOMENTUM = 1e-5, 0.1


def whole() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A batch of 2 + 3 images, the weight, the bias, and the gradient of the result."""
    x, grad = random_inputs([(5, 3, 4, 4), (5, 3, 4, 4)], torch.float32)
    weight, bias = random_inputs([(3,), (3,)], torch.float32)
    return x * 2 + 1, weight, bias, grad


def ranks(x: Tensor) -> list[Tensor]:
    return [part.npu() for part in x.split([2, 3])]


def joint_stats(parts: list[Tensor], by: str, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    counts = torch.tensor([part.numel() / part.size(1) for part in parts], device="npu")
    of_each = torch.batch_norm_stats if by == "stats" else torch_npu.batch_norm_reduce
    joined = (
        torch.batch_norm_gather_stats_with_counts if by == "stats" else torch_npu.batch_norm_gather_stats_update
    )
    first, second = (torch.stack(rows) for rows in zip(*(of_each(part, EPS) for part in parts), strict=True))
    result: tuple[Tensor, Tensor] = joined(parts[0], first, second, mean, variance, MOMENTUM, EPS, counts)
    return result


@pytest.mark.parametrize("by", ["stats", "sums"])
def test_ranks_together_normalise_as_one_does(by: str) -> None:
    x, weight, bias, _ = whole()
    mean, variance = torch.zeros(3), torch.ones(3)
    expected = F.batch_norm(x, mean, variance, weight, bias, True, MOMENTUM, EPS)
    running = torch.zeros(3, device="npu"), torch.ones(3, device="npu")
    stats = joint_stats(ranks(x), by, *running)
    ours = [torch.batch_norm_elemt(part, weight.npu(), bias.npu(), *stats, EPS) for part in ranks(x)]
    assert_equal([torch.cat(ours), *running], [expected, mean, variance], 1e-5)


def test_ranks_together_have_the_gradients_of_one() -> None:
    x, weight, bias, grad = whole()
    leaves = [leaf.requires_grad_() for leaf in (x, weight, bias)]
    F.batch_norm(x, None, None, weight, bias, True, MOMENTUM, EPS).backward(grad)
    parts, grads, scale = ranks(x.detach()), ranks(grad), weight.detach().npu()
    stats = joint_stats(parts, "stats", torch.zeros(3, device="npu"), torch.ones(3, device="npu"))
    pairs = list(zip(grads, parts, strict=True))
    reduced = [torch.batch_norm_backward_reduce(g, p, *stats, scale, True, True, True) for g, p in pairs]
    of_grad, of_product, for_weight, for_bias = (sum(each) for each in zip(*reduced, strict=True))
    count = torch.tensor([80], device="npu")
    for_x = [torch.batch_norm_backward_elemt(g, p, *stats, scale, of_grad, of_product, count) for g, p in pairs]
    assert_equal([torch.cat(for_x), for_weight, for_bias], [leaf.grad for leaf in leaves], 1e-5)


def test_the_sums_of_half_width_inputs_are_wide() -> None:
    mean, invstd = torch.batch_norm_stats(torch.ones(2, 3, 4, dtype=torch.float16, device="npu"), EPS)
    assert (mean.dtype, invstd.dtype) == (torch.float32, torch.float32)

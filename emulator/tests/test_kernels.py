"""Operators without gradients: the emulated NPU computes them natively, and as the CPU does."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ascend_emulator.native_ops import native_operators
from torch import Tensor

from emulator.tests.compare import DTYPES, assert_equal, on, random_inputs

pytestmark = pytest.mark.once(why="what an operator computes is the same in each schedule")

THREADS = torch.get_num_threads()


def rows(like: Tensor) -> Tensor:
    return torch.tensor([1, 3], device=like.device)


# Each works on its first argument or fills it.
IN_PLACE: dict[str, Callable[..., Any]] = {
    "zero_": lambda a, b: a.zero_(),
    "fill_": lambda a, b: a.fill_(2.5),
    "fill_tensor": lambda a, b: a.fill_(b[0, 0]),
    "copy_": lambda a, b: a.copy_(b),
    "copy_strided": lambda a, b: a[:, ::2].copy_(b[:, 1:4]),
    "copy_cast": lambda a, b: a.copy_(b.to(torch.int64)),
    "copy_broadcast": lambda a, b: a.copy_(b[0]),
    "add_": lambda a, b: a.add_(b, alpha=3),
    "add_scalar_": lambda a, b: a.add_(3),
    "add_transposed": lambda a, b: a.t().add_(b.t()),
    "sub_": lambda a, b: a.sub_(b),
    "mul_": lambda a, b: a.mul_(b),
    "mul_scalar_": lambda a, b: a.mul_(0.9),
    "div_": lambda a, b: a.div_(b.abs() + 1),
    "floor_divide": lambda a, b: torch.div(a, b.abs() + 1, rounding_mode="floor"),
    "trunc_divide_": lambda a, b: a.div_(0.3, rounding_mode="trunc"),
    "pow_": lambda a, b: a.pow_(2),
    "addcmul_": lambda a, b: a.addcmul_(b, b, value=0.1),
    "addcdiv_": lambda a, b: a.addcdiv_(b, b.abs() + 1, value=0.1),
    "lerp_": lambda a, b: a.lerp_(b, 0.1),
    "lerp_tensor_": lambda a, b: a.lerp_(b, b),
    "addmm_": lambda a, b: a.addmm_(b, b.t() @ a),
    "baddbmm_": lambda a, b: a.unsqueeze(0).baddbmm_(b.unsqueeze(0), (b.t() @ a).unsqueeze(0)),
    "clamp_": lambda a, b: a.clamp_(-1, 1),
    "clamp_max_": lambda a, b: a.clamp_max_(0.5),
    "clamp_min_tensor_": lambda a, b: a.clamp_min_(b),
    "relu_": lambda a, b: a.relu_(),
    "silu_": lambda a, b: F.silu(a, inplace=True),
    "hardswish_": lambda a, b: F.hardswish(a, inplace=True),
    "hardsigmoid_": lambda a, b: F.hardsigmoid(a, inplace=True),
    "hardtanh_": lambda a, b: F.hardtanh_(a, -0.5, 0.7),
    "mish_": lambda a, b: F.mish(a, inplace=True),
    "threshold_": lambda a, b: F.threshold(a, 0.5, 9, inplace=True),
    "tril_": lambda a, b: a.tril_(),
    "triu_": lambda a, b: a.triu_(1),
    "masked_fill_": lambda a, b: a.masked_fill_(b > 0, 7),
    "masked_fill_tensor_": lambda a, b: a.masked_fill_(b > 0, b[0, 0]),
    "scatter_add_": lambda a, b: a.scatter_add_(1, (b > 0).long(), b),
    "one_element": lambda a, b: a[1, 2].fill_(5),
    "cumsum_": lambda a, b: a.cumsum_(1),
    "cumsum_of_view_": lambda a, b: a[:, 1:3].cumsum_(0),
    "index_put_": lambda a, b: a.index_put_((rows(a), rows(a)[:1]), b[0, 0]),
    "index_put_column_": lambda a, b: a.__setitem__((slice(None), rows(a)), b[:, :2]),
    "index_put_nothing_": lambda a, b: a.__setitem__(rows(a)[:0], 7),
    "index_put_integers_": lambda a, b: a.long().index_put_((rows(a),), b[:2].long(), accumulate=True),
    "bitwise_not_": lambda a, b: (a > 0).bitwise_not_(),
    "float8_": lambda a, b: a.to(torch.float8_e5m2).zero_(),
}
NOT_DIFFERENTIABLE: dict[str, Callable[..., Any]] = {
    "compare_tensors": lambda a, b: [a == b, a != b, a < b, a <= b, a > b, a >= b],
    "compare_scalars": lambda a, b: [a == 1, a != 1, a < 1, a <= 1, a > 1, a >= 1],
    "compare_in_place": lambda a, b: [a.clone().lt_(b), a.clone().eq_(0.5)],
    "logical": lambda a, b: [(a > 0) & (b > 0), (a > 0) | (b > 0), ~(a > 0), (a > 0).logical_xor(b > 0)],
    "bitwise": lambda a, b: [(a > 0).bitwise_and_(True), a.to(torch.int32) | 5, a.to(torch.int32).bitwise_not()],
    "isfinite": lambda a, b: (a / b.clamp_min(0)).isfinite(),
    "isneginf": lambda a, b: [(a / b.clamp_min(0)).isneginf(), (-a.abs() / 0).isneginf(), a.long().isneginf()],
    "any_all": lambda a, b: [(a > 0).any(), (a > 0).all(1), (a > -9).all(), (a > 1).any(0, keepdim=True)],
    "argmax": lambda a, b: [a.argmax(), a.argmin(1), a.argmax(0, keepdim=True)],
    "extremes": lambda a, b: [a.max(), a.min(), a.amin(0), a.min(1, keepdim=True)],
    "rounding": lambda a, b: [a.floor(), a.ceil(), a.trunc(), (a * 9).round(), a.sgn(), a.sign()],
    "sort": lambda a, b: [*a.sort(1), *a.sort(dim=0, descending=True, stable=True), a.argsort(1)],
    "sort_out": lambda a, b: torch.sort(a, out=(torch.empty_like(a), torch.empty_like(a, dtype=torch.int64))),
    "topk": lambda a, b: [*a.topk(2), *a.topk(2, 0, largest=False), *b.long().topk(3, sorted=True)],
    "cumsum": lambda a, b: [
        a.cumsum(0),
        (a > 0).cumsum(1),
        a.cumsum(0, dtype=torch.float32),
        torch.cumsum(a, 0, out=a.new_empty(0)),
    ],
    "index": lambda a, b: [
        a[rows(a)],
        a[rows(a), rows(a)],
        a[None, :, rows(a).int()],
        a[rows(a)[:0]],
        a[torch.tensor([1, 0])],
        a.long()[:, rows(a)],
    ],
    "exponentials": lambda a, b: [a.exp2(), a.expm1(), a.exp_(), b.abs().log1p(), b.abs().log2(), b.abs().log10()],
    "hyperbolic": lambda a, b: [a.sinh(), a.cosh(), a.tan(), a.erf(), a.tanh_(), b.sigmoid_()],
    "integers": lambda a, b: [
        a.to(torch.int32) + 2,
        a.long() // 2,
        a.to(torch.int32) * b.to(torch.int32),
        -a.long(),
    ],
    "sum_to_float": lambda a, b: [
        a.sum(dtype=torch.float32),
        a.long().sum(),
        (a > 0).sum(0),
        a.mean(dtype=torch.float32),
    ],
    "norms": lambda a, b: [torch.linalg.vector_norm(a, p, dim=1) for p in (0, 1, 2, float("inf"))],
    "arange": lambda a, b: [
        torch.arange(7, device=a.device),
        torch.arange(0, 1, 0.25, device=a.device, dtype=a.dtype),
    ],
    "constants": lambda a, b: [
        torch.ones_like(a),
        torch.zeros_like(a),
        torch.full_like(a, 3),
        torch.ones(2, device=a.device),
        torch.full((2,), 7, device=a.device),
        torch.zeros(2, 2, device=a.device),
        torch.eye(3, 4, device=a.device),
    ],
    "empty": lambda a, b: [a[:0].sum(), a[:0] + 1, torch.cat([a[:0], b])],
    "roll": lambda a, b: [a.roll(1, 0), a.tril(), a.triu(1), a.flip(0, 1)],
    "out": lambda a, b: [torch.add(a, b, out=a.new_empty(4, 5)), torch.mul(a, b, out=a.new_empty(5, 4).t())],
    "products_out": lambda a, b: [
        torch.mm(a, b.t(), out=a.new_empty(4, 4)),
        torch.matmul(a, b.t(), out=a.new_empty(4, 4)),
    ],
    "scalar_first": lambda a, b: [2 / (a.abs() + 1), 2**a, torch.tensor(3.0) * a],
    "pow_tensor": lambda a, b: a.abs() ** b,
    "casts": lambda a, b: [
        a.to(t) for t in (torch.float16, torch.float32, torch.bfloat16, torch.int32, torch.bool)
    ],
    "casts_to_float8": lambda a, b: [
        [a.to(t).float(), a.t().to(t).to(torch.bfloat16), a.to(t).t().contiguous().float()]
        for t in (torch.float8_e4m3fn, torch.float8_e5m2)
    ],
    "item": lambda a, b: [a[0, 0].item(), (a > 0).sum().item(), a[1].tolist()],
}


@pytest.mark.usefixtures("native_only")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*IN_PLACE, *NOT_DIFFERENTIABLE])
def test_other_operators_equal_those_of_the_cpu(name: str, dtype: torch.dtype) -> None:
    function = {**IN_PLACE, **NOT_DIFFERENTIABLE}[name]
    inputs = random_inputs([(4, 5), (4, 5)], dtype)
    expected_inputs, result_inputs = on("cpu", [each.clone() for each in inputs]), on("npu", inputs)
    expected = function(*expected_inputs)
    results = function(*result_inputs)
    assert_equal(results, expected)
    assert_equal(result_inputs, expected_inputs)


def unscale(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Halves them; the last of what is returned says whether one is not finite."""
    device = gradients[0].device
    found, half = torch.zeros(1, device=device), torch.full((1,), 0.5, device=device)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, half)
    return [*gradients, found]


FOREACH: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: torch._foreach_add(a, b, alpha=0.5),
    "add_": lambda a, b: torch._foreach_add_(a, b, alpha=0.5),
    "add_scalar_": lambda a, b: torch._foreach_add_(a, 0.3),
    "add_scalars": lambda a, b: torch._foreach_add(a, [0.3, 1.7]),
    "sub": lambda a, b: torch._foreach_sub(a, b, alpha=2),
    "sub_scalar": lambda a, b: torch._foreach_sub(a, 0.3),
    "mul": lambda a, b: torch._foreach_mul(a, b),
    "mul_scalar_": lambda a, b: torch._foreach_mul_(a, 0.75),
    "mul_scalars": lambda a, b: torch._foreach_mul(a, [0.3, 1.7]),
    "div": lambda a, b: torch._foreach_div(a, b),
    "div_scalars_": lambda a, b: torch._foreach_div_(a, [0.3, 1.7]),
    "pow": lambda a, b: torch._foreach_pow(a, 2),
    "sqrt_abs": lambda a, b: torch._foreach_sqrt(torch._foreach_abs(a)),
    "neg_": lambda a, b: torch._foreach_neg_(a),
    "reciprocal": lambda a, b: torch._foreach_reciprocal(a),
    "exp_log": lambda a, b: torch._foreach_log(torch._foreach_exp(a)),
    "sigmoid_tanh": lambda a, b: [*torch._foreach_sigmoid(a), *torch._foreach_tanh(a), *torch._foreach_sign(a)],
    "maximum_": lambda a, b: torch._foreach_maximum_(a, b),
    "minimum": lambda a, b: torch._foreach_minimum(a, [0.1, 0.2]),
    "clamp": lambda a, b: torch._foreach_clamp_max(torch._foreach_clamp_min(a, -0.5), 0.5),
    "lerp_": lambda a, b: torch._foreach_lerp_(a, b, 0.1),
    "lerp_list": lambda a, b: torch._foreach_lerp(a, b, b),
    "addcmul_": lambda a, b: torch._foreach_addcmul_(a, b, b, 0.1),
    "addcmul_scalars": lambda a, b: torch._foreach_addcmul(a, b, b, [0.1, 0.2]),
    "addcmul_tensor": lambda a, b: torch._foreach_addcmul(a, b, b, torch.tensor([0.1, 0.2])),
    "addcdiv_": lambda a, b: torch._foreach_addcdiv_(a, b, b, 0.1),
    "addcdiv_scalars_": lambda a, b: torch._foreach_addcdiv_(a, b, b, [-0.1, -0.2]),
    "addcdiv_tensor_": lambda a, b: torch._foreach_addcdiv_(a, b, b, torch.tensor([0.1, 0.2])),
    "norm": lambda a, b: [
        *torch._foreach_norm(a),
        *torch._foreach_norm(a, 1),
        *torch._foreach_norm(a, float("inf")),
    ],
    "zero_": lambda a, b: torch._foreach_zero_(a),
    "unscale": lambda a, b: unscale(a),
    "unscale_infinite": lambda a, b: unscale(torch._foreach_div(a, [0.5, 0.0])),
    "copy_": lambda a, b: torch._foreach_copy_(a, b),
}


@pytest.mark.usefixtures("native_only")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FOREACH)
def test_operators_over_lists_equal_those_of_the_cpu(name: str, dtype: torch.dtype) -> None:
    tensors = random_inputs([(4, 5), (3,), (4, 5), (3,)], dtype)
    lists = [tensors[:2], tensors[2:]]
    expected_lists, result_lists = [[on("cpu", [t.clone() for t in each]) for each in lists], on("npu", lists)]
    expected = FOREACH[name](*expected_lists)
    results = FOREACH[name](*result_lists)
    if expected is not None:
        assert_equal(results, expected)
    assert_equal(result_lists, expected_lists)


def test_native_kernels_are_asynchronous() -> None:
    stream, event = torch.npu.Stream(), torch.npu.Event()
    matrix = torch.randn(1200, 1200, device="npu")
    torch.npu.synchronize()
    with torch.npu.stream(stream):
        for _ in range(8):
            product = matrix @ matrix
        event.record()
    assert not event.query()
    stream.synchronize()
    assert event.query()
    torch.testing.assert_close(product.cpu(), matrix.cpu() @ matrix.cpu())


def test_kernels_take_and_give_strided_views() -> None:
    base = torch.arange(48.0).view(6, 8)
    ours = base.to("npu")
    for tensor in (base, ours):
        torch.mul(tensor[1:3, 1:4], 2, out=tensor[3:5, 2:8:2])
        tensor.t()[0].copy_(tensor[:, 5])
        torch.mm(tensor[:2, :3].clone(), tensor[:3, :2].clone(), out=tensor[4:, 6:].t())
    assert_equal(ours, base)


@pytest.mark.usefixtures("native_only")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, *DTYPES], ids=str)
def test_histograms_are_counted(dtype: torch.dtype) -> None:
    values = torch.tensor([0, 1, 1, 7, 3, 9, 2, 1], dtype=dtype)
    ours = values.to("npu")
    for bins, low, high in ((8, 0, 7), (10, 0, 9), (3, 0, 0), (4, 2, 8)):
        histogram = torch.histc(ours, bins=bins, min=low, max=high)
        assert histogram.dtype == dtype
        assert_equal(histogram, torch.histc(values.double(), bins=bins, min=low, max=high).to(dtype))
    counts = torch.empty(8, dtype=dtype, device="npu")
    assert torch.histc(ours, 8, 0, 7, out=counts) is counts
    assert counts.tolist() == [1, 3, 1, 1, 0, 0, 0, 1]


@pytest.mark.usefixtures("native_only")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_added_up_by_index_is_added_in_one_order(dtype: torch.dtype) -> None:
    """Large enough for the CPU to use several threads, which add up in another order each time."""
    (values,) = random_inputs([(4096, 512)], dtype)
    rows = (torch.arange(4096) % 7).to("npu")
    ours = values.to("npu")

    def added() -> Tensor:
        return torch.zeros(7, 512, dtype=dtype, device="npu").index_put_((rows,), ours, accumulate=True).cpu()

    first = added()
    assert all(torch.equal(added(), first) for _ in range(5))
    one_by_one = torch.zeros(7, 512, dtype=dtype)
    for row, value in zip(rows.tolist(), values, strict=True):
        one_by_one[row] += value
    assert_equal(first, one_by_one)
    assert torch.get_num_threads() == THREADS


def test_an_index_of_another_dtype_is_refused_and_the_device_lives_on() -> None:
    x = torch.randn(3, 4, device="npu")
    with pytest.raises(RuntimeError, match="aclnnGather: an index is of int32 or int64, not of Char"):
        x.gather(0, torch.zeros(1, 4, dtype=torch.int8, device="npu"))
    assert x.gather(0, torch.zeros(1, 4, dtype=torch.int64, device="npu")).cpu().equal(x[:1].cpu())


def test_an_unknown_dtype_says_its_number() -> None:
    x = torch.zeros(2, 3).to(torch.float8_e8m0fnu).to("npu")
    with pytest.raises(RuntimeError, match=r"aclnnInplaceCopy: the emulated NPU does not know the dtype .* 37"):
        x.t().contiguous()


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch_npu has got some of them since")
def test_native_operators_exist() -> None:
    registered = {
        name
        for key in ("PrivateUse1", "AutogradPrivateUse1")
        for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)
    }
    assert native_operators() <= registered

"""The emulated NPU computes what the CPU does: natively where training needs it, else by the fallback."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ascend_emulator.native_ops import native_operators
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from tests.emulator.gpt import CONTEXT, GPT, VOCABULARY

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def native_only(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fails a test in which an operator went to the CPU fallback, even one that another operator called."""
    with caplog.at_level(logging.DEBUG, logger="ascend_emulator.fallback"):
        yield
    assert [record.getMessage() for record in caplog.get_records("call")] == []


def random_inputs(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def on(device: str, tensors: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach().to(device) if isinstance(leaf, Tensor) else leaf, tensors)


def with_gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """The result, and the gradients of a sum that weighs each of its elements differently."""
    for each in inputs:
        each.requires_grad_()
    result = function(*inputs)
    weights = torch.linspace(-1, 2, result.numel()).to(result.device, result.dtype)
    result.backward(weights.view(result.shape))
    return [result.detach(), *(each.grad for each in inputs if each.grad is not None)]


def assert_equal(npu: Any, cpu: Any, tolerance: float = 0) -> None:
    pairs = list(zip(tree_leaves(npu), tree_leaves(cpu), strict=True))
    assert pairs
    for ours, theirs in pairs:
        if isinstance(theirs, Tensor):
            torch.testing.assert_close(ours.cpu(), theirs, rtol=tolerance, atol=tolerance, equal_nan=True)
        else:
            assert ours == theirs


CAUSAL = torch.tril(torch.ones(6, 6)) == 0
ROWS = torch.tensor([[0, 3, 3], [2, 0, 1]])
CLASSES = torch.tensor([1, 0, 4, -100])
SQUARE, OTHER, POSITIVE = (4, 5), (4, 5), (5,)


def constant(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor.to(like.device)


# name: (function, shapes of its inputs)
DIFFERENTIABLE: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "add": (lambda a, b: a.add(b, alpha=2), [SQUARE, POSITIVE]),
    "add_scalar": (lambda a: 3 + a, [SQUARE]),
    "sub": (lambda a, b: a - b, [SQUARE, OTHER]),
    "rsub": (lambda a: 1 - a, [SQUARE]),
    "mul": (lambda a, b: a * b, [SQUARE, POSITIVE]),
    "mul_scalar": (lambda a: a * 0.125, [SQUARE]),
    "div": (lambda a, b: a / (b.square() + 1), [SQUARE, OTHER]),
    "div_scalar": (lambda a: a / 3, [SQUARE]),
    "neg": (lambda a: -a, [SQUARE]),
    "abs": (lambda a: a.abs(), [SQUARE]),
    "pow": (lambda a: a**3, [SQUARE]),
    "sqrt": (lambda a: (a.abs() + 1).sqrt(), [SQUARE]),
    "rsqrt": (lambda a: (a.abs() + 1).rsqrt(), [SQUARE]),
    "reciprocal": (lambda a: (a.abs() + 1).reciprocal(), [SQUARE]),
    "exp": (lambda a: a.exp(), [SQUARE]),
    "log": (lambda a: (a.abs() + 1).log(), [SQUARE]),
    "sin_cos": (lambda a: a.sin() + a.cos(), [SQUARE]),
    "tanh": (lambda a: a.tanh(), [SQUARE]),
    "sigmoid": (lambda a: a.sigmoid(), [SQUARE]),
    "relu": (lambda a: a.relu(), [SQUARE]),
    "silu": (lambda a: F.silu(a), [SQUARE]),
    "gelu": (lambda a: F.gelu(a), [SQUARE]),
    "gelu_tanh": (lambda a: F.gelu(a, approximate="tanh"), [SQUARE]),
    "clamp": (lambda a: a.clamp(-0.5, 0.5), [SQUARE]),
    "clamp_min": (lambda a: a.clamp_min(0.1), [SQUARE]),
    "clamp_tensor": (lambda a, b: torch.clamp(a, max=b), [SQUARE, OTHER]),
    "maximum": (torch.maximum, [SQUARE, OTHER]),
    "where": (lambda a, b: torch.where(a > b, a, b), [SQUARE, OTHER]),
    "masked_fill": (lambda a: a.masked_fill(constant(CAUSAL, a), -1e4), [(2, 6, 6)]),
    "lerp": (lambda a, b: a.lerp(b, 0.3), [SQUARE, OTHER]),
    "lerp_tensor": (torch.lerp, [SQUARE, OTHER, OTHER]),
    "addcmul": (lambda a, b, c: a.addcmul(b, c, value=0.5), [SQUARE, OTHER, OTHER]),
    "addcdiv": (lambda a, b, c: a.addcdiv(b, c.square() + 1, value=0.5), [SQUARE, OTHER, OTHER]),
    "mm": (torch.mm, [(4, 5), (5, 3)]),
    "mm_transposed": (lambda a, b: a.t() @ b.t(), [(5, 4), (3, 5)]),
    "mv": (torch.mv, [(4, 5), (5,)]),
    "dot": (torch.dot, [(5,), (5,)]),
    "addmm": (lambda a, b, c: torch.addmm(a, b, c, beta=0.5, alpha=2), [(3,), (4, 5), (5, 3)]),
    "bmm": (torch.bmm, [(2, 4, 5), (2, 5, 3)]),
    "baddbmm": (torch.baddbmm, [(2, 4, 3), (2, 4, 5), (2, 5, 3)]),
    "matmul_4d": (torch.matmul, [(2, 3, 4, 5), (2, 3, 5, 4)]),
    "matmul_3d_2d": (torch.matmul, [(2, 4, 5), (5, 3)]),
    "matmul_broadcast": (torch.matmul, [(4, 5), (2, 3, 5, 4)]),
    "linear": (F.linear, [(2, 4, 5), (3, 5), (3,)]),
    "linear_no_bias": (F.linear, [(2, 4, 5), (3, 5)]),
    "sum": (lambda a: a.sum(), [SQUARE]),
    "sum_dim": (lambda a: a.sum((0, 2), keepdim=True), [(2, 3, 4)]),
    "mean": (lambda a: a.mean(), [SQUARE]),
    "mean_dim": (lambda a: a.mean(-1, keepdim=True), [SQUARE]),
    "amax": (lambda a: a.amax(1), [SQUARE]),
    "max_dim": (lambda a: a.max(1).values, [SQUARE]),
    "logsumexp": (lambda a: a.logsumexp(1), [SQUARE]),
    "vector_norm": (lambda a: torch.linalg.vector_norm(a), [SQUARE]),
    "softmax": (lambda a: a.softmax(-1), [(2, 3, 6)]),
    "log_softmax": (lambda a: a.log_softmax(1), [(2, 3, 6)]),
    "layer_norm": (lambda a, w, b: F.layer_norm(a, (5,), w, b), [(2, 4, 5), (5,), (5,)]),
    "layer_norm_plain": (lambda a: F.layer_norm(a, (5,)), [(2, 4, 5)]),
    "rms_norm": (lambda a, w: F.rms_norm(a, (5,), w, 1e-5), [(2, 4, 5), (5,)]),
    "nll_loss": (lambda a: F.nll_loss(a, constant(CLASSES, a)), [(4, 5)]),
    "cross_entropy": (lambda a: F.cross_entropy(a, constant(CLASSES, a)), [(4, 5)]),
    "cross_entropy_none": (lambda a: F.cross_entropy(a, constant(CLASSES, a), reduction="none"), [(4, 5)]),
    "mse_loss": (F.mse_loss, [SQUARE, OTHER]),
    "logits_loss": (lambda a: F.binary_cross_entropy_with_logits(a, torch.ones_like(a) / 4), [SQUARE]),
    "embedding": (lambda w: F.embedding(constant(ROWS, w), w), [(4, 5)]),
    "index_select": (lambda a: a.index_select(0, constant(ROWS[0], a)), [(4, 5)]),
    "gather": (lambda a: a.gather(1, constant(ROWS, a)), [(2, 5)]),
    "scatter_add": (lambda a, b: a.scatter_add(1, constant(ROWS, a), b), [(2, 5), (2, 3)]),
    "cat": (lambda a, b: torch.cat([a, b], 1), [(4, 2), (4, 3)]),
    "stack": (lambda a, b: torch.stack([a, b], 1), [SQUARE, OTHER]),
    "tril": (lambda a: a.tril(-1), [SQUARE]),
    "repeat": (lambda a: a.repeat(2, 1), [SQUARE]),
    "flip": (lambda a: a.flip(0), [SQUARE]),
    "pad": (lambda a: F.pad(a, (1, 2), value=3.0), [SQUARE]),
    "views": (lambda a: a.view(4, 3, 2).permute(2, 0, 1).unbind(0)[1].expand(2, 4, 3) * 2, [(4, 6)]),
    "chunk": (lambda a: a.chunk(2, -1)[1].contiguous() * a.chunk(2, -1)[0], [(4, 6)]),
    "widen": (lambda a: a.float().softmax(-1).to(a.dtype), [SQUARE]),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v), [(2, 4, 6, 8)] * 3),
    "attention_causal": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [(2, 4, 6, 8)] * 3,
    ),
    "attention_masked": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=~constant(CAUSAL, q)),
        [(2, 4, 6, 8)] * 3,
    ),
    "attention_grouped": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        [(2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8)],
    ),
}
# Sums in another order than the CPU's: the largest difference allowed, absolute and relative, for float32 and
# bfloat16. Attention is computed in float throughout, where the CPU rounds the weights to bfloat16.
ROUNDED = {"matmul_broadcast": (1e-6, 0)} | {
    name: (2e-6, 4e-2) for name in DIFFERENTIABLE if name.startswith("attention")
}


@pytest.mark.usefixtures("native_only")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_result_and_gradients_equal_those_of_the_cpu(name: str, dtype: torch.dtype) -> None:
    function, shapes = DIFFERENTIABLE[name]
    inputs = random_inputs(shapes, dtype)
    expected = with_gradients(function, on("cpu", inputs))
    results = with_gradients(function, on("npu", inputs))
    assert_equal(results, expected, ROUNDED.get(name, (0, 0))[DTYPES.index(dtype)])


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
    "threshold_": lambda a, b: F.threshold(a, 0.5, 9, inplace=True),
    "tril_": lambda a, b: a.tril_(),
    "triu_": lambda a, b: a.triu_(1),
    "masked_fill_": lambda a, b: a.masked_fill_(b > 0, 7),
    "masked_fill_tensor_": lambda a, b: a.masked_fill_(b > 0, b[0, 0]),
    "scatter_add_": lambda a, b: a.scatter_add_(1, (b > 0).long(), b),
    "one_element": lambda a, b: a[1, 2].fill_(5),
    "bitwise_not_": lambda a, b: (a > 0).bitwise_not_(),
}
NOT_DIFFERENTIABLE: dict[str, Callable[..., Any]] = {
    "compare_tensors": lambda a, b: [a == b, a != b, a < b, a <= b, a > b, a >= b],
    "compare_scalars": lambda a, b: [a == 1, a != 1, a < 1, a <= 1, a > 1, a >= 1],
    "compare_in_place": lambda a, b: [a.clone().lt_(b), a.clone().eq_(0.5)],
    "logical": lambda a, b: [(a > 0) & (b > 0), (a > 0) | (b > 0), ~(a > 0), (a > 0).logical_xor(b > 0)],
    "bitwise": lambda a, b: [(a > 0).bitwise_and_(True), a.to(torch.int32) | 5, a.to(torch.int32).bitwise_not()],
    "isfinite": lambda a, b: (a / b.clamp_min(0)).isfinite(),
    "any_all": lambda a, b: [(a > 0).any(), (a > 0).all(1), (a > -9).all(), (a > 1).any(0, keepdim=True)],
    "argmax": lambda a, b: [a.argmax(), a.argmin(1), a.argmax(0, keepdim=True)],
    "extremes": lambda a, b: [a.max(), a.min(), a.amin(0), a.min(1, keepdim=True)],
    "rounding": lambda a, b: [a.floor(), a.ceil(), a.trunc(), (a * 9).round(), a.sgn(), a.sign()],
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


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw_foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=True),
    "adamw_plain": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=False),
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "sgd_foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
    "sgd_plain": lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=False),
}


def train(device: str, modern: bool, dtype: torch.dtype, optimizer_name: str) -> list[float]:
    """Three steps of two accumulated batches with clipped gradients: the losses."""
    torch.manual_seed(0)
    model = GPT(modern).to(dtype).to(device)
    tokens, targets = torch.randint(0, VOCABULARY, (2, 3, 2, 4, CONTEXT)).to(device)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    losses = []
    for step in range(3):
        for batch in range(2):
            loss = model(tokens[step, batch], targets[step, batch])
            (loss / 2).backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses]


@pytest.mark.usefixtures("native_only")
@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=str)
@pytest.mark.parametrize("modern", [False, True], ids=["classic", "modern"])
def test_gpt_trains_natively_as_on_the_cpu(
    modern: bool, dtype: torch.dtype, tolerance: float, optimizer_name: str
) -> None:
    losses = train("npu", modern, dtype, optimizer_name)
    assert losses == pytest.approx(train("cpu", modern, dtype, optimizer_name), rel=tolerance)
    assert train("npu", modern, dtype, optimizer_name) == losses, "the same bits in each run"


def test_gpt_under_autocast_is_near_the_cpu() -> None:
    losses = {}
    for device in ("cpu", "npu"):
        torch.manual_seed(0)
        model = GPT(modern=False).to(device)
        tokens = torch.randint(0, VOCABULARY, (4, CONTEXT)).to(device)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(tokens, tokens)
        loss.backward()
        gradient = model.blocks[0].attention.inputs.weight.grad
        losses[device] = [loss.item(), gradient.norm().item()]
    assert losses["npu"] == pytest.approx(losses["cpu"], rel=2e-2)


def test_random_numbers_follow_the_seed() -> None:
    def draw() -> list[Tensor]:
        torch.manual_seed(5)
        draws = [
            torch.randn(1000, device="npu"),
            torch.randn(1000, device="npu"),
            torch.rand(1000, device="npu"),
            torch.randint(0, 100, (1000,), device="npu").float(),
            torch.empty(1000, device="npu").bernoulli_(0.25),
            torch.full((1000,), 0.25, device="npu").bernoulli(),
            F.dropout(torch.ones(1000, device="npu"), 0.25),
            torch.randperm(1000, device="npu").float(),
        ]
        return [each.cpu() for each in draws]

    first, second = draw(), draw()
    assert_equal(first, second)
    normal, again, uniform, integers, coins, more_coins, dropped, order = first
    assert not torch.equal(normal, again)
    for values, mean, deviation in (
        (normal, 0, 1),
        (again, 0, 1),
        (uniform, 0.5, 0.289),
        (integers, 49.5, 28.9),
        (coins, 0.25, 0.433),
        (more_coins, 0.25, 0.433),
        (dropped, 1, 0.577),
    ):
        assert abs(values.mean() - mean) < 0.15 * deviation
        assert abs(values.std() - deviation) < 0.1 * deviation
    assert order.sort().values.equal(torch.arange(1000.0))


def test_random_numbers_of_the_npu_leave_those_of_the_cpu_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    torch.randn(3, device="npu")
    torch.randperm(3, device="npu")
    assert_equal(torch.rand(3), expected)


def test_dropout_drops_the_same_in_backward() -> None:
    x = torch.ones(64, 64, device="npu", requires_grad=True)
    y = F.dropout(x, 0.5)
    y.sum().backward()
    assert_equal(x.grad, y.detach().cpu())


def test_attention_dropout_is_reproducible_and_has_gradients() -> None:
    query, key, value = on("npu", random_inputs([(1, 2, 32, 8)] * 3, torch.float32))

    def attend(value: Tensor) -> Tensor:
        torch.manual_seed(3)
        return F.scaled_dot_product_attention(query, key, value, dropout_p=0.5)

    value.requires_grad_()
    assert_equal(attend(value).detach(), attend(value).detach().cpu())
    attend(value).sum().backward()
    step = torch.zeros_like(value)
    step[0, 0, 5, 3] = 1
    slope = attend(value.detach() + step).sum() - attend(value.detach()).sum()  # linear in value
    torch.testing.assert_close(slope.cpu(), value.grad[0, 0, 5, 3].cpu(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "SBH"])
def test_fused_attention_takes_every_layout(layout: str) -> None:
    def arrange(by_heads: Tensor) -> Tensor:
        match layout:
            case "BNSD":
                return by_heads
            case "BSND":
                return by_heads.transpose(1, 2)
            case "BSH":
                return by_heads.transpose(1, 2).flatten(2)
            case _:
                return by_heads.permute(2, 0, 1, 3).flatten(2)

    inputs = random_inputs([(2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8)], torch.float32)
    expected = with_gradients(
        lambda q, k, v: arrange(F.scaled_dot_product_attention(q, k, v, enable_gqa=True)), on("cpu", inputs)
    )
    results = with_gradients(
        lambda q, k, v: torch.ops.npu.npu_fusion_attention(
            arrange(q), arrange(k), arrange(v), 4, layout, scale=8**-0.5
        )[0],
        on("npu", inputs),
    )
    assert_equal(results, expected, 2e-6)


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


FALLBACK: dict[str, Callable[..., Any]] = {
    "sort": lambda a: a.sort(1),
    "cumsum": lambda a: a.cumsum(0),
    "topk": lambda a: a.topk(2),
    "in_place": lambda a: a.cumsum_(1),
    "in_place_view": lambda a: a[:, 1:3].cumsum_(0),
    "in_place_twice_the_same": lambda a: a.atan2_(a),
    "out": lambda a: torch.cumsum(a, 0, out=torch.empty_like(a)),
    "out_resized": lambda a: torch.cumsum(a, 0, out=a.new_empty(0)),
    "outs": lambda a: torch.sort(a, out=(torch.empty_like(a), torch.empty_like(a, dtype=torch.int64))),
    "index": lambda a: a[torch.tensor([1, 0], device=a.device)],
    "index_put": lambda a: a.index_put_((torch.tensor([1, 0], device=a.device),), a[0] * 2),
    "optional": lambda a: torch.searchsorted(a.sort().values, a),
    "list": lambda a: torch._foreach_ceil([a, a * 2]),
    "list_in_place": lambda a: torch._foreach_ceil_([a]),
    "factory": lambda a: torch.linspace(0, 1, 5, device=a.device),
    "norm_of_unusual_order": lambda a: torch.linalg.vector_norm(a, 4, dim=1),
    "norm_out": lambda a: torch.linalg.vector_norm(a, 4, out=a.new_empty(())),
    "composite": lambda a: F.kl_div(a.log_softmax(1), a.softmax(1), reduction="batchmean"),
    "integers": lambda a: a.abs().long().flatten().bincount(),
}


@pytest.mark.parametrize("name", FALLBACK)
def test_fallback_equals_the_cpu(name: str) -> None:
    (theirs,) = random_inputs([(4, 5)], torch.float32)
    ours = on("npu", theirs)
    expected, results = FALLBACK[name](theirs), FALLBACK[name](ours)
    assert all(leaf.device.type == "npu" for leaf in tree_leaves(results) if isinstance(leaf, Tensor))
    assert_equal(ours, theirs)
    if results is not None:
        assert_equal(results, expected)


def test_fallback_returns_the_tensor_that_it_wrote() -> None:
    x, out = torch.ones(3, device="npu"), torch.empty(3, device="npu")
    assert x.cumsum_(0) is x
    assert torch.cumsum(x, 0, out=out) is out


def test_fallback_has_gradients() -> None:
    def function(a: Tensor) -> Tensor:
        return a.sort(1).values.cumsum(0) + F.kl_div(a.log_softmax(1), a.softmax(1), reduction="sum")

    inputs = random_inputs([(4, 5)], torch.float32)
    expected = with_gradients(function, on("cpu", inputs))
    assert_equal(with_gradients(function, on("npu", inputs)), expected)


def test_an_operator_without_any_kernel_says_its_name() -> None:
    x = torch.ones(2, 4, device="npu")
    with pytest.raises(NotImplementedError, match="npu::npu_fast_gelu"):
        torch.ops.npu.npu_fast_gelu(x)
    with pytest.raises(NotImplementedError, match="aten::_masked_scale"):
        torch._masked_scale(x, x.bool(), 0.5)


def test_an_unknown_dtype_says_its_number() -> None:
    x = torch.zeros(2, 3).to(torch.float8_e4m3fn).to("npu")
    with pytest.raises(RuntimeError, match="aclnnInplaceCopy: unknown aclDataType 36"):
        x.t().contiguous()


def test_native_operators_exist() -> None:
    registered = {
        name
        for key in ("PrivateUse1", "AutogradPrivateUse1")
        for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)
    }
    assert native_operators() <= registered

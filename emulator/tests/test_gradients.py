"""Operators with gradients: the emulated NPU computes both natively, and as the CPU does."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from emulator.tests.compare import DTYPES, assert_equal, constant, on, random_inputs, with_gradients
from emulator.tests.llama import rotate_pairs

pytestmark = [
    pytest.mark.once(why="what an operator computes is the same in each schedule"),
    pytest.mark.detector_only(why="takes long"),
]

CAUSAL = torch.tril(torch.ones(6, 6)) == 0
ROWS = torch.tensor([[0, 3, 3], [2, 0, 1]])
CLASSES = torch.tensor([1, 0, 4, -100])
SQUARE, OTHER, POSITIVE, IMAGES = (4, 5), (4, 5), (5,), (2, 3, 6, 6)


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
    "hardswish": (F.hardswish, [SQUARE]),
    "hardsigmoid": (F.hardsigmoid, [SQUARE]),
    "hardtanh": (lambda a: F.hardtanh(a, -0.5, 0.7), [SQUARE]),
    "leaky_relu": (lambda a: F.leaky_relu(a, 0.2), [SQUARE]),
    "leaky_relu_": (lambda a: F.leaky_relu_(a * 2, 0.2), [SQUARE]),
    "elu": (lambda a: F.elu(a, 0.7), [SQUARE]),
    "elu_": (lambda a: F.elu_(a * 2, 0.7), [SQUARE]),
    "mish": (F.mish, [SQUARE]),
    "log_sigmoid": (F.logsigmoid, [SQUARE]),
    "glu": (lambda a: F.glu(a, 0), [SQUARE]),
    "softplus": (lambda a: F.softplus(a, beta=2, threshold=1.5), [SQUARE]),
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
    "group_norm": (lambda a, w, b: F.group_norm(a, 2, w, b), [(2, 4, 3, 3), (4,), (4,)]),
    "group_norm_plain": (lambda a: F.group_norm(a, 2), [(3, 4, 5)]),
    "upsample_1d": (lambda a: F.interpolate(a, scale_factor=2.0), [(2, 3, 5)]),
    "upsample_1d_to_size": (lambda a: F.interpolate(a, size=7), [(2, 3, 5)]),
    "upsample_2d": (lambda a: F.interpolate(a, scale_factor=2.0), [IMAGES]),
    "upsample_2d_to_size": (lambda a: F.interpolate(a, size=(9, 4)), [IMAGES]),
    "upsample_bilinear": (lambda a: F.interpolate(a, scale_factor=1.5, mode="bilinear"), [IMAGES]),
    "upsample_bilinear_to_size": (
        lambda a: F.interpolate(a, size=(9, 4), mode="bilinear", align_corners=True),
        [IMAGES],
    ),
    "rms_norm": (lambda a, w: F.rms_norm(a, (5,), w, 1e-5), [(2, 4, 5), (5,)]),
    "nll_loss": (lambda a: F.nll_loss(a, constant(CLASSES, a)), [(4, 5)]),
    "cross_entropy": (lambda a: F.cross_entropy(a, constant(CLASSES, a)), [(4, 5)]),
    "cross_entropy_none": (lambda a: F.cross_entropy(a, constant(CLASSES, a), reduction="none"), [(4, 5)]),
    "variance": (lambda a: a.var(1), [SQUARE]),
    "variance_corrected": (lambda a: a.var(correction=3), [SQUARE]),
    "deviation": (lambda a: a.std(0, keepdim=True, correction=0), [SQUARE]),
    "variance_and_mean": (lambda a: torch.stack(torch.var_mean(a, 1)), [SQUARE]),
    "smooth_l1_loss": (lambda a, b: F.smooth_l1_loss(a, b, beta=0.5), [SQUARE, OTHER]),
    "smooth_l1_loss_sum": (lambda a, b: F.smooth_l1_loss(a, b, reduction="sum"), [SQUARE, OTHER]),
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
    "sort": (lambda a: a.sort(1, descending=True).values, [SQUARE]),
    "topk": (lambda a: a.topk(2, 0).values, [SQUARE]),
    "cumsum": (lambda a: a.cumsum(1), [SQUARE]),
    "index": (lambda a: a[:, constant(ROWS, a)], [SQUARE]),
    "index_two": (lambda a: a[constant(ROWS, a), constant(ROWS[:, :1], a)], [SQUARE]),
    "index_put": (lambda a, b: a.index_put((constant(ROWS[1], a),), b), [SQUARE, (3, 5)]),
    "index_add_up": (lambda a, b: a.index_put((constant(ROWS[0], a),), b, accumulate=True), [SQUARE, (3, 5)]),
    "complex_product": (lambda a, b: rotate_pairs(a, b.float()), [(2, 3, 8), (3, 4)]),
    "convolution": (lambda a, w, b: F.conv2d(a, w, b, padding=1), [IMAGES, (4, 3, 3, 3), (4,)]),
    "convolution_sparse": (lambda a, w: F.conv2d(a, w, stride=2, dilation=2), [IMAGES, (4, 3, 3, 3)]),
    "convolution_same": (lambda a, w: F.conv2d(a, w, padding="same"), [IMAGES, (4, 3, 3, 5)]),
    "convolution_by_channel": (lambda a, w, b: F.conv2d(a, w, b, groups=3), [IMAGES, (6, 1, 3, 3), (6,)]),
    "convolution_of_one": (lambda a, w, b: F.conv2d(a, w, b), [(3, 6, 6), (4, 3, 3, 3), (4,)]),
    "convolution_1d": (lambda a, w, b: F.conv1d(a, w, b, stride=2), [(2, 3, 8), (4, 3, 3), (4,)]),
    "convolution_3d": (lambda a, w, b: F.conv3d(a, w, b), [(2, 3, 4, 4, 4), (4, 3, 2, 2, 2), (4,)]),
    "convolution_for_its_bias": (lambda b: F.conv2d(b.new_ones(2, 3, 6, 6), b.new_ones(4, 3, 3, 3), b), [(4,)]),
    "convolution_1d_for_its_bias": (lambda b: F.conv1d(b.new_ones(2, 3, 8), b.new_ones(4, 3, 3), b), [(4,)]),
    "convolution_for_its_weight": (lambda w: F.conv2d(w.new_ones(2, 3, 6, 6), w), [(4, 3, 3, 3)]),
    "convolution_transposed": (
        lambda a, w, b: F.conv_transpose2d(a, w, b, stride=2, output_padding=1),
        [IMAGES, (3, 4, 3, 3), (4,)],
    ),
    "batch_norm": (lambda a, w, b: F.batch_norm(a, None, None, w, b, training=True), [IMAGES, (3,), (3,)]),
    "batch_norm_plain": (lambda a: F.batch_norm(a, None, None, training=True), [(4, 5)]),
    "batch_norm_fixed": (
        lambda a, w, b: F.batch_norm(a, torch.ones_like(w), torch.full_like(w, 4), w, b),
        [IMAGES, (3,), (3,)],
    ),
    "max_pool": (lambda a: F.max_pool2d(a, 3, stride=2, padding=1, ceil_mode=True), [IMAGES]),
    "max_pool_1d": (lambda a: F.max_pool1d(a, 2), [(2, 3, 8)]),
    "avg_pool": (lambda a: F.avg_pool2d(a, 3, stride=2, padding=1, ceil_mode=True), [IMAGES]),
    "avg_pool_divided": (lambda a: F.avg_pool2d(a, (3, 2), divisor_override=5), [IMAGES]),
    "adaptive_avg_pool": (lambda a: F.adaptive_avg_pool2d(a, (4, 3)), [IMAGES]),
    "adaptive_avg_pool_to_one": (lambda a: F.adaptive_avg_pool2d(a, 1), [IMAGES]),
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
# Sums in another order than the CPU's: the largest difference allowed, absolute and relative, for each dtype.
# Attention is computed in float throughout, where the CPU rounds the weights to the dtype.
ROUNDED = {"matmul_broadcast": (1e-6, 0, 0)} | {
    name: (2e-6, 4e-2, 5e-3) for name in DIFFERENTIABLE if name.startswith("attention")
}


@pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format")  # of images, told once
@pytest.mark.usefixtures("native_only")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_result_and_gradients_equal_those_of_the_cpu(name: str, dtype: torch.dtype) -> None:
    if name.startswith("smooth_l1") and dtype == torch.float16 and torch.__version__ < "2.10":
        pytest.skip("torch 2.9 has it for float16 on no CPU, so there is nothing to compare with")
    function, shapes = DIFFERENTIABLE[name]
    inputs = random_inputs(shapes, dtype)
    expected = with_gradients(function, on("cpu", inputs))
    results = with_gradients(function, on("npu", inputs))
    assert_equal(results, expected, ROUNDED.get(name, (0, 0, 0))[DTYPES.index(dtype)])


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


PRODUCTS: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((4, 5), (5, 3)),
    ((5,), (5,)),
    ((4, 5), (5,)),
    ((5,), (5, 3)),
    ((2, 4, 5), (5, 3)),
    ((2, 4, 5), (2, 5, 3)),
    ((4, 5), (2, 5, 3)),
    ((2, 1, 4, 5), (3, 5, 2)),
]


@pytest.mark.usefixtures("native_only")
@pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format")  # torch_npu's, of gradcheck's zeros
@pytest.mark.parametrize("shapes", PRODUCTS, ids=str)
def test_a_matrix_product_has_gradients_of_its_gradients(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    factors = [each.to("npu", torch.float64).requires_grad_() for each in random_inputs(shapes, torch.float64)]
    assert torch.autograd.gradgradcheck(torch.matmul, factors)


def test_a_gradient_penalty_is_that_of_the_cpu() -> None:
    def penalty(x: Tensor, w: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(((x @ w) ** 3).sum(), x, create_graph=True)
        return grad.norm()

    inputs = random_inputs([(4, 5), (5, 3)], torch.float32)
    assert_equal(with_gradients(penalty, on("npu", inputs)), with_gradients(penalty, on("cpu", inputs)), 1e-6)


@pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format")
def test_norms_in_float64_have_gradients_of_that_dtype() -> None:
    x, weight, bias = (
        each.to("npu").requires_grad_() for each in random_inputs([(4, 6), (6,), (6,)], torch.float64)
    )
    assert torch.autograd.gradcheck(lambda x, w, b: F.layer_norm(x, (6,), w, b), (x, weight, bias))
    assert torch.autograd.gradcheck(lambda x, w, b: F.group_norm(x, 2, w, b), (x, weight, bias))
    F.layer_norm(x, (6,), weight, None).sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float64


def second_gradient(function: Callable[[Tensor], Tensor], device: str, x: Tensor) -> Tensor:
    """That of the squared length of the gradient of the result's squared length."""
    x = x.to(device).requires_grad_()
    (grad,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
    grad.square().sum().backward()
    assert x.grad is not None
    return x.grad


# It is torch_npu that raises, and so it does on hardware: see "Second derivatives" in emulator/docs/operators.md.
@pytest.mark.filterwarnings("ignore:npu.*an autograd kernel was not registered", "ignore:Cannot create tensor with")
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: F.max_pool2d(x, 2), "aclnnGather: an index is of int32 or int64, not of Char"),
        (lambda x: F.dropout(x, 0.5), "The size of tensor a"),
        (lambda x: F.scaled_dot_product_attention(x, x, x), "dy should be 3 or 4 dimensional"),
    ],
    ids=["max_pool", "dropout", "attention"],
)
def test_what_has_no_second_derivative_says_so(function: Callable[[Tensor], Tensor], message: str) -> None:
    (x,) = random_inputs([(2, 3, 8, 8)], torch.float32)
    with pytest.raises(RuntimeError, match=message):
        second_gradient(function, "npu", x)
    assert x.to("npu").square().sum().item() == pytest.approx(x.square().sum().item())  # the device lives on


def test_attention_in_plain_products_has_a_second_derivative() -> None:
    def attention(x: Tensor) -> Tensor:
        return (x @ x.transpose(-1, -2)).softmax(-1) @ x

    (x,) = random_inputs([(2, 3, 8, 8)], torch.float32)
    assert_equal(second_gradient(attention, "npu", x), second_gradient(attention, "cpu", x), 1e-3)

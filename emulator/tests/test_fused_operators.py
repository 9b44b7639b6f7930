"""torch_npu's fused operators: the emulated NPU computes what formulas of plain torch compute on the CPU.

A fused operator computes in float32 and rounds once, so the formulas are given float32 and rounded at their end.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from emulator.tests.compare import DTYPES, assert_equal, constant, on, random_inputs, with_gradients
from emulator.tests.launch import EMULATOR, run, write_script

pytestmark = pytest.mark.once(why="what an operator computes is the same in each schedule")

npu = torch.ops.npu
LABELS, EXPERTS = torch.tensor([1, 0, 4, 2]), torch.tensor([[0, 2], [1, 0], [2, 1], [2, 0], [1, 2]])
WEIGHTS = torch.tensor([0.5, 1.0, 0.25, 0.75, 1.0])


def rotated(x: Tensor, mode: str) -> Tensor:
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat([-second, first], -1)
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


def geglu(x: Tensor, dim: int, approximate: str, gate: int) -> Tensor:
    halves = x.chunk(2, dim)
    return halves[1 - gate] * F.gelu(halves[gate], approximate=approximate)


def permuted(tokens: Tensor, kept: int | None = None) -> Tensor:
    order = constant(EXPERTS, tokens).flatten().argsort(stable=True)
    return tokens[order[:kept] // 2]


def unpermuted(rows: Tensor, probabilities: Tensor) -> Tensor:
    order = constant(EXPERTS, rows).flatten().argsort(stable=True)
    copies = torch.zeros_like(rows).index_put((order,), rows).view(5, 2, -1)
    return (copies * probabilities.unsqueeze(-1)).sum(1)


def positions(like: Tensor) -> Tensor:
    return constant(EXPERTS.flatten().argsort(stable=True).argsort().int(), like)


# name: (the fused operator, the formula, shapes of the inputs)
FUSED: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[tuple[int, ...]]]] = {
    **{
        f"rotary_{mode}_{layout}": (
            lambda x, cos, sin, mode=mode: npu.npu_rotary_mul(x, cos, sin, mode),
            lambda x, cos, sin, mode=mode: cos * x + sin * rotated(x, mode),
            [(2, 3, 4, 8), shape, shape],
        )
        for mode in ("half", "interleave")
        for layout, shape in (("bsnd", (1, 3, 1, 8)), ("sbnd", (2, 1, 1, 8)), ("bnsd", (2, 3, 4, 8)))
    },
    "fast_gelu": (npu.fast_gelu, lambda x: x * (1.702 * x).sigmoid(), [(4, 5)]),
    "npu_fast_gelu": (npu.npu_fast_gelu, lambda x: x * (1.702 * x).sigmoid(), [(4, 5)]),
    "geglu": (lambda x: npu.npu_geglu(x)[0], lambda x: geglu(x, -1, "tanh", 1), [(3, 8)]),
    "geglu_exact": (lambda x: npu.npu_geglu(x, 0, 0)[0], lambda x: geglu(x, 0, "none", 1), [(4, 3)]),
    "geglu_left": (
        lambda x: npu.npu_geglu(x, -1, 1, activate_left=True)[0],
        lambda x: geglu(x, -1, "tanh", 0),
        [(2, 3, 8)],
    ),
    "transpose_then_reshape": (
        lambda x: npu.npu_confusion_transpose(x, (0, 2, 1, 3), (2, 4, 18), True),
        lambda x: x.permute(0, 2, 1, 3).reshape(2, 4, 18),
        [(2, 3, 4, 6)],
    ),
    "reshape_then_transpose": (
        lambda x: npu.npu_confusion_transpose(x, (2, 0, 1), (2, 12, 6), False),
        lambda x: x.reshape(2, 12, 6).permute(2, 0, 1),
        [(2, 3, 4, 6)],
    ),
    "permute": (lambda x: npu.npu_moe_token_permute(x, constant(EXPERTS, x))[0], permuted, [(5, 3)]),
    "permute_to_one": (
        lambda x: npu.npu_moe_token_permute(x, constant(EXPERTS[:, 0], x))[0],
        lambda x: x[constant(EXPERTS[:, 0], x).argsort(stable=True)],
        [(5, 3)],
    ),
    "permute_some": (
        lambda x: npu.npu_moe_token_permute(x, constant(EXPERTS, x), 6)[0],
        lambda x: permuted(x, 6),
        [(5, 3)],
    ),
    "permute_but_some": (
        lambda x: npu.npu_moe_token_permute(x, constant(EXPERTS, x), -2)[0],
        lambda x: permuted(x, 8),
        [(5, 3)],
    ),
    "unpermute": (
        lambda x, p: npu.npu_moe_token_unpermute(x, positions(x), p),
        unpermuted,
        [(10, 3), (5, 2)],
    ),
    "unpermute_of_one": (
        lambda x: npu.npu_moe_token_unpermute(x, positions(x)),
        lambda x: x[constant(EXPERTS, x).flatten().argsort(stable=True).argsort()],
        [(10, 3)],
    ),
    "there_and_back": (
        lambda x, p: npu.npu_moe_token_unpermute(*npu.npu_moe_token_permute(x, constant(EXPERTS, x)), p),
        lambda x, p: x * p.sum(1, keepdim=True),
        [(5, 3), (5, 2)],
    ),
    **{
        f"cross_entropy_{reduction}_{name}": (
            lambda x, reduction=reduction, weight=weight, ignored=ignored, smoothing=smoothing: (
                npu.npu_cross_entropy_loss(
                    x,
                    constant(LABELS, x),
                    None if weight is None else constant(weight, x),
                    reduction,
                    ignored,
                    smoothing,
                )[0]
            ),
            lambda x, reduction=reduction, weight=weight, ignored=ignored, smoothing=smoothing: F.cross_entropy(
                x, LABELS, weight, reduction=reduction, ignore_index=ignored, label_smoothing=smoothing
            ).reshape(-1),
            [(4, 5)],
        )
        for reduction in ("mean", "sum", "none")
        for name, weight, ignored, smoothing in (
            ("plain", None, -100, 0.0),
            ("ignoring", None, 4, 0.0),
            ("weighted_and_smooth", WEIGHTS, 2, 0.1),
        )
    },
}
# How far derivatives may be from autograd's, which sums in another order, as float32.
TOLERANCE = 1e-6
# One last place of a narrow dtype of numbers around 1, where float32 falls on either side of a tie.
ROUNDED = {torch.float32: TOLERANCE, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.mark.usefixtures("native_only")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FUSED)
def test_result_and_gradients_are_those_of_the_formula(name: str, dtype: torch.dtype) -> None:
    fused, formula, shapes = FUSED[name]
    inputs = random_inputs(shapes, dtype)
    expected = with_gradients(lambda *wide: formula(*wide).to(dtype), [each.float() for each in on("cpu", inputs)])
    results = with_gradients(fused, on("npu", inputs))
    assert [each.dtype for each in results] == [dtype] * len(expected)
    assert_equal(results, [each.to(dtype) for each in expected], ROUNDED[dtype])


def test_rotary_positions_may_be_given_by_a_matrix() -> None:
    x, cos, sin, matrix = random_inputs([(2, 3, 4, 8), (1, 3, 1, 8), (1, 3, 1, 8), (8, 8)], torch.float32)
    ours = npu.npu_rotary_mul(*on("npu", [x, cos, sin]), "half", matrix.to("npu"))
    assert_equal(ours, cos * x + sin * (x @ matrix), TOLERANCE)


@pytest.mark.slow(why="a process imports torch")
def test_what_a_fused_operator_does_not_take_is_told_at_the_next_synchronisation(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import torch
        npu = torch.ops.npu

        def told(call):
            stream = torch.npu.Stream()  # an error stays with its stream
            stream.wait_stream(torch.npu.current_stream())
            with torch.npu.stream(stream):
                call()
            try:
                stream.synchronize()
            except RuntimeError as error:
                print([line for line in str(error).splitlines() if "aclnn" in line], flush=True)

        x, weight, targets = torch.randn(2, 5).npu(), torch.ones(5, 3).npu(), torch.tensor([1, -100]).npu()
        told(lambda: npu.npu_cross_entropy_loss(x, targets))
        told(lambda: npu.npu_cross_entropy_loss(x, targets.abs() % 5, return_zloss=True))
        told(lambda: npu.npu_grouped_matmul([x], [weight], scale=[weight[0]], group_list=[2]))
        told(lambda: npu.npu_moe_token_permute(x, targets, padded_mode=True))
        import os; os._exit(0)
        """,
    )
    lines = run(*EMULATOR, script, cwd=tmp_path).stdout.splitlines()
    expected = [
        "aclnnCrossEntropyLoss failed on the device: Target -100 is out of bounds.",
        "aclnnCrossEntropyLoss failed on the device: the z-loss is not supported, nor is it on hardware",
        "aclnnGroupedMatmul failed on the device: the emulated NPU multiplies no quantised groups",
        "aclnnMoeTokenPermute failed on the device: the padded mode is not supported, nor is it on hardware",
    ]
    assert len(lines) == len(expected)
    assert all(message in line for message, line in zip(expected, lines, strict=True)), lines


def split(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return list(x.split(list(sizes)))


SIZES = (2, 0, 5)


def grouped(x: Any, weight: Any, **options: Any) -> list[Tensor]:
    results: list[Tensor] = npu.npu_grouped_matmul(x, weight, **options)
    return results


@pytest.mark.usefixtures("native_only")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_groups_of_rows_are_multiplied_by_their_weights(dtype: torch.dtype) -> None:
    x, weight, bias = random_inputs([(7, 4), (3, 4, 5), (3, 5)], dtype)
    ours, our_weight, our_bias = on("npu", [x, weight, bias])
    ends, counts = torch.tensor(SIZES).cumsum(0).to("npu"), torch.tensor(SIZES).to("npu")
    parts = [rows @ each for rows, each in zip(split(x, SIZES), weight, strict=True)]
    for groups, kind in ((ends, 0), (counts, 1)):
        for weights in ([our_weight], list(our_weight)):
            options = {"group_list": groups, "group_type": 0, "group_list_type": kind}
            assert_equal(grouped([ours], weights, split_item=3, **options), [torch.cat(parts)])
    assert_equal(grouped([ours], list(our_weight), group_list=[2, 2, 7]), parts)
    assert_equal(grouped([ours], list(our_weight), group_list=ends, group_type=0), parts)
    biased = [
        (rows.float() @ each.float() + b.float()).to(dtype)
        for rows, each, b in zip(split(x, SIZES), weight, bias, strict=True)
    ]
    assert_equal(grouped([ours], list(our_weight), bias=list(our_bias), group_list=[2, 2, 7]), biased)
    active = grouped([ours], [our_weight], group_list=ends, group_type=0, split_item=2, act_type=5)
    assert_equal(
        active,
        [
            torch.cat(
                [F.silu(rows.float() @ each.float()) for rows, each in zip(split(x, SIZES), weight, strict=True)]
            ).to(dtype)
        ],
    )


@pytest.mark.usefixtures("native_only")
def test_lists_of_matrices_are_multiplied_one_by_one() -> None:
    *x, first, second = random_inputs([(2, 4), (3, 6), (4, 5), (6, 5)], torch.float32)
    ours, weights = on("npu", [x, [first, second]])
    parts = [x[0] @ first, x[1] @ second]
    ends = torch.tensor([2, 5], device="npu")
    assert_equal(grouped(ours, weights, group_list=[]), parts)
    assert_equal(grouped(ours, weights, group_list=ends, group_type=0, split_item=3), [torch.cat(parts)])


@pytest.mark.usefixtures("native_only")
def test_the_gradients_of_grouped_products_are_grouped_products() -> None:
    x, weight, grad = random_inputs([(7, 4), (3, 4, 5), (7, 5)], torch.float32)
    expected_x, expected_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    parts = [rows @ each for rows, each in zip(split(expected_x, SIZES), expected_weight, strict=True)]
    torch.cat(parts).backward(grad)
    ours, our_weight, our_grad = on("npu", [x, weight, grad])
    options = {"group_list": torch.tensor(SIZES).cumsum(0).to("npu"), "split_item": 3}
    assert_equal(grouped([our_grad], [our_weight.transpose(1, 2)], group_type=0, **options), [expected_x.grad])
    assert_equal(grouped([ours.t()], [our_grad], group_type=2, **options), [expected_weight.grad], TOLERANCE)


@pytest.mark.usefixtures("native_only")
@pytest.mark.parametrize("maximize", [False, True])
def test_adamw_by_one_call_steps_as_the_optimizer_does(maximize: bool) -> None:
    weights, *gradients = random_inputs([(4, 5)] * 4, torch.float32)
    parameter = weights.clone().requires_grad_()
    optimizer = torch.optim.AdamW([parameter], lr=0.1, maximize=maximize)
    ours = weights.to("npu")
    mean, square = torch.zeros_like(ours), torch.zeros_like(ours)
    for step, gradient in enumerate(gradients):
        parameter.grad = gradient
        optimizer.step()
        updated = npu.npu_apply_adam_w.out(
            0.9**step,
            0.999**step,
            0.1,
            0.01,
            0.9,
            0.999,
            1e-8,
            gradient.to("npu"),
            None,
            False,
            maximize,
            out=[ours, mean, square],
        )
        assert [each.data_ptr() for each in updated] == [each.data_ptr() for each in (ours, mean, square)]
    state = optimizer.state[parameter]
    assert_equal([ours, mean, square], [parameter.detach(), state["exp_avg"], state["exp_avg_sq"]], TOLERANCE)


def test_adamw_by_one_call_has_no_amsgrad() -> None:
    x = torch.ones(3, device="npu")
    with pytest.raises(NotImplementedError, match="npu_apply_adam_w with amsgrad"):
        npu.npu_apply_adam_w.out(1, 1, 0.1, 0, 0.9, 0.999, 1e-8, x, x, True, False, out=[x, x, x])

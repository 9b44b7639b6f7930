"""Products of quantised matrices, against formulas on the CPU."""

import pytest
import torch
from torch import Tensor

from emulator.tests.compare import assert_equal, random_inputs

npu = torch.ops.npu

# torch_npu says once in a process that it would have liked to.
pytestmark = pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format")
# As torch_npu's functions pass them.
INT32, HALF, BFLOAT16 = 3, 5, 15


def integers(*shape: int, low: int = -9, high: int = 9) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(2))


def packed(numbers: Tensor) -> Tensor:
    """Eight of int4 in one int32."""
    result = torch.zeros(*numbers.shape[:-1], numbers.size(-1) // 8, dtype=torch.int64)
    for place in range(8):
        result |= (numbers[..., place::8].long() & 15) << (4 * place)
    return torch.where(result >= 2**31, result - 2**32, result).to(torch.int32)


def test_products_are_scaled_shifted_and_rounded() -> None:
    x, w, bias = integers(4, 6), integers(6, 5), integers(5).int()
    scale, offset = (each.abs() for each in random_inputs([(5,), (5,)], torch.float32))
    (per_token,) = random_inputs([(4,)], torch.float32)
    ours = [each.npu() for each in (x, w, scale)]
    product = x.float() @ w.float()
    rounded = ((product + bias) * scale + offset).round().clamp(-128, 127).to(torch.int8)
    assert_equal(npu.npu_quant_matmul(*ours, offset=offset.npu(), bias=bias.npu()), rounded)
    half = npu.npu_quant_matmul(*ours, pertoken_scale=per_token.npu(), output_dtype=HALF)
    assert_equal(half, (product * scale * per_token[:, None]).half(), 1e-3)
    wide = npu.npu_quant_matmul(*ours, bias=offset.npu(), output_dtype=BFLOAT16)
    assert_equal(wide, (product * scale + offset).bfloat16(), 1e-2)
    assert_equal(npu.npu_quant_matmul(*ours, output_dtype=INT32), product.int())


def test_a_scale_may_be_packed() -> None:
    x, w = integers(4, 6), integers(6, 5)
    scale = torch.tensor([0.5, 1, 2, 0.25, 4])
    param = npu.npu_trans_quant_param(scale.npu(), torch.full((5,), -3.0).npu())
    assert [value >> 37 & 511 for value in param.tolist()] == [509] * 5
    assert_equal(
        npu.npu_quant_matmul(x.npu(), w.npu(), param, output_dtype=HALF), ((x.float() @ w.float()) * scale).half()
    )


@pytest.mark.parametrize("transposed", [False, True])
def test_int4_comes_eight_in_an_int32(transposed: bool) -> None:
    x, w = integers(4, 16, low=-8, high=8), integers(16, 8, low=-8, high=8)
    weight = packed(w.t().contiguous()).npu().t() if transposed else packed(w).npu()
    product = npu.npu_quant_matmul(packed(x).npu(), weight, torch.ones(1).npu(), output_dtype=HALF)
    assert_equal(product, (x.float() @ w.float()).half())


def test_what_hardware_does_not_take_is_refused() -> None:
    x, w = integers(4, 6).npu(), integers(6, 5).npu()
    with pytest.raises(RuntimeError, match=r"does not take torch\.int8 with a scale of torch\.float16"):
        npu.npu_quant_matmul(x, w, torch.ones(1).half().npu())
    with pytest.raises(NotImplementedError, match="without groups"):
        npu.npu_quant_matmul(x, w, torch.ones(1).npu(), group_sizes=[1, 1, 32])


def test_a_quantised_weight_has_scales_by_column_or_by_group() -> None:
    x, scale, offset, bias = random_inputs([(3, 64), (2, 5), (2, 5), (5,)], torch.float32)
    w = integers(64, 5)
    by_column = npu.npu_weight_quant_batchmatmul(
        x.npu(), w.npu(), scale[0].npu(), offset[0].npu(), None, None, bias.npu()
    )
    assert_equal(by_column, x @ ((w.float() + offset[0]) * scale[0]) + bias, 1e-4)
    by_group = npu.npu_weight_quant_batchmatmul(
        x.npu(), w.npu(), scale.npu(), None, None, None, None, antiquant_group_size=32
    )
    assert_equal(by_group, x @ (w.float() * scale.repeat_interleave(32, 0)), 1e-4)


def test_numbers_are_brought_back() -> None:
    x = integers(3, 16, low=-8, high=8)
    (scale,) = random_inputs([(16,)], torch.float32)
    expected = ((x + 2.0) * scale).half()
    for given in (x, packed(x)):
        assert_equal(npu.npu_anti_quant(given.npu(), scale.npu(), offset=torch.full((16,), 2.0).npu()), expected)


def test_updates_are_quantised_and_put_where_each_batch_says() -> None:
    x = integers(2, 5, 8)
    (updates,) = random_inputs([(2, 1, 8)], torch.float32)
    scale, expected = torch.linspace(0.01, 0.5, 8), x.clone()
    values = (updates / scale + 1).round().clamp(-128, 127).to(torch.int8)
    expected[0, 3], expected[1, 0] = values[0, 0], values[1, 0]
    ours, places = x.npu(), torch.tensor([3, 0], dtype=torch.int32).npu()
    arguments = (places, updates.npu(), scale.npu(), torch.ones(8).npu())
    assert_equal(npu.npu_quant_scatter(ours, *arguments), expected)
    assert_equal(ours, x)
    npu.npu_quant_scatter_(ours, *arguments)
    assert_equal(ours, expected)

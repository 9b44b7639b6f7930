"""Attention for inference, and fused parts of attention, against PyTorch's own on the CPU."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from emulator.tests.compare import assert_equal, random_inputs, with_gradients

npu = torch.ops.npu

# torch_npu says once in a process that it would have liked to.
pytestmark = pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format")


def qkv(queries: int, keys: int, heads: int = 4) -> list[Tensor]:
    """By batch, head, position; the keys and values have two heads."""
    return random_inputs([(2, heads, queries, 8), (2, 2, keys, 8), (2, 2, keys, 8)], torch.float32)


def in_layout(x: Tensor, layout: str) -> Tensor:
    if layout == "BNSD":
        return x
    return x.transpose(1, 2).flatten(2) if layout == "BSH" else x.transpose(1, 2)


def expected(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
    k, v = (each.repeat_interleave(q.size(1) // 2, 1) for each in (k, v))
    return F.scaled_dot_product_attention(q, k, v, seen, scale=0.3)


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD"])
def test_attention_to_prompts_and_to_what_came_before(layout: str) -> None:
    inputs = qkv(5, 5)
    ours = [in_layout(each, layout).npu() for each in inputs]
    options: dict[str, Any] = {"num_heads": 4, "num_key_value_heads": 2, "scale_value": 0.3, "input_layout": layout}
    result = npu.npu_prompt_flash_attention(*ours, **options)
    assert_equal(result, in_layout(expected(*inputs), layout), 1e-5)
    one = [inputs[0][:, :, :1], *inputs[1:]]
    ours = [in_layout(each, layout).npu() for each in one]
    seen = (torch.arange(5) < torch.tensor([[3], [4]])).view(2, 1, 1, 5)
    result = npu.npu_incre_flash_attention(*ours, actual_seq_lengths=[3, 4], **options)
    assert_equal(result, in_layout(expected(*one, seen), layout), 1e-5)


@pytest.mark.parametrize("mode", ["mask", "window", "left", "right", "lengths"])
def test_prompts_are_masked(mode: str) -> None:
    inputs = qkv(4, 6)
    position, ones = torch.arange(6) - torch.arange(4).view(4, 1), torch.ones(4, 6, dtype=torch.bool)
    options, seen = {
        "mask": ({"atten_mask": (~ones.tril(2)).npu(), "next_tokens": 9}, ones.tril(2)),
        "window": (
            {"atten_mask": (~ones).npu(), "pre_tokens": 1, "next_tokens": 2},
            (position >= -1) & (position <= 2),
        ),
        "left": ({"sparse_mode": 2}, position <= 0),
        "right": ({"sparse_mode": 3}, position <= 2),
        "lengths": ({"actual_seq_lengths_kv": [3]}, ones & (torch.arange(6) < 3)),
    }[mode]
    result = npu.npu_prompt_flash_attention(
        *(each.npu() for each in inputs),
        num_heads=4,
        num_key_value_heads=2,
        scale_value=0.3,
        input_layout="BNSD",
        **options,
    )
    assert_equal(result, expected(*inputs, seen), 1e-5)


def test_rows_behind_a_sequence_s_end_are_zeros() -> None:
    inputs = qkv(4, 4)
    result = npu.npu_prompt_flash_attention(
        *(each.npu() for each in inputs),
        num_heads=4,
        num_key_value_heads=2,
        scale_value=0.3,
        input_layout="BNSD",
        actual_seq_lengths=[4, 2],
    )
    whole = expected(*inputs)
    whole[1, :, 2:] = 0
    assert_equal(result, whole, 1e-5)


def test_quantised_attention_is_refused() -> None:
    inputs, scale = [each.npu() for each in qkv(1, 4)], torch.ones(1).npu()
    with pytest.raises(NotImplementedError, match="npu_prompt_flash_attention unquantised"):
        npu.npu_prompt_flash_attention(*inputs, deq_scale1=scale)
    with pytest.raises(NotImplementedError, match="npu_incre_flash_attention unquantised"):
        npu.npu_incre_flash_attention(*inputs, block_table=scale)


def test_a_softmax_has_mask_and_bias() -> None:
    x, mask, bias = random_inputs([(1, 2, 3, 4, 4), (1, 2, 1, 4, 4), (1, 1, 3, 4, 4)], torch.float32)
    ours = npu.npu_masked_softmax_with_rel_pos_bias(x.npu(), mask.npu(), bias.npu(), 0.5)
    assert_equal(ours, (x * 0.5 + mask + bias).softmax(-1), 1e-5)


def test_dropout_keeps_a_part_and_its_gradient() -> None:
    x = torch.ones(40, 50, device="npu", requires_grad=True)
    result = npu.dropout_with_byte_mask(x, 0.25, True)
    assert 0.7 < (result > 0).float().mean().item() < 0.8
    assert_equal(result.max(), torch.tensor(1 / 0.75), 1e-6)
    result.sum().backward()
    assert_equal(x.grad, result.detach().cpu())
    assert npu.dropout_with_byte_mask(x, 0.25, False) is x
    with pytest.raises(RuntimeError, match="probability"):
        npu._dropout_with_byte_mask(x, 1.5)


def test_dropout_may_be_decided_before() -> None:
    x = torch.ones(16, 64, device="npu")
    mask = npu.npu_dropout_gen_mask([16, 64], 0.25, dtype=torch.float32, device="npu")
    dropped, same = npu.npu_dropout_do_mask(x, mask, 0.25)
    assert same.data_ptr() == mask.data_ptr()
    assert_equal(dropped[dropped > 0].unique(), torch.tensor([1 / 0.75]), 1e-6)
    assert_equal(npu.npu_dropout_do_mask(x, mask, 0.25)[0], dropped.cpu())


def test_dropout_follows_a_softmax_of_a_sum() -> None:
    x, y = (each.npu() for each in random_inputs([(8, 16), (8, 16)], torch.float32))
    x.requires_grad_()
    mask, softmax, dropped = npu.npu_dropout_with_add_softmax(x, y, 0.5, 0.5, -1)
    assert_equal(softmax, (y.cpu() + 0.5 * x.detach().cpu()).softmax(-1), 1e-6)
    kept = (dropped > 0).cpu()
    assert 0.3 < kept.float().mean().item() < 0.7
    assert_equal(dropped, softmax.cpu() * kept * 2, 1e-6)
    assert_equal(npu.npu_dropout_do_mask(softmax, mask, 0.5)[0], dropped.detach().cpu(), 1e-6)
    dropped.backward(torch.linspace(-1, 2, 128, device="npu").view(8, 16))
    leaf = x.detach().cpu().requires_grad_()
    theirs = (y.cpu() + 0.5 * leaf).softmax(-1) * kept * 2
    theirs.backward(torch.linspace(-1, 2, 128).view(8, 16))
    assert_equal(x.grad, leaf.grad, 1e-6)


def test_many_heads_have_the_result_and_the_gradients_of_one_formula() -> None:
    length, heads, each = 16, 2, 4
    shapes = [(2 * length, 8)] * 3 + [(8, 8)] * 4 + [(8,)] * 4
    mask = random_inputs([(2, heads, length, length)], torch.float32)[0]

    def ours(q: Tensor, k: Tensor, v: Tensor, *weights: Tensor) -> Tensor:
        w, bias = weights[:4], weights[4:]
        options = (None, heads, each, length, length, 0.0, True)
        return npu.npu_multi_head_attention(q, k, v, *w[:3], mask.npu(), w[3], *bias, *options)[0]

    def theirs(q: Tensor, k: Tensor, v: Tensor, *weights: Tensor) -> Tensor:
        inputs = zip((q, k, v), weights[:3], weights[4:7], strict=True)
        q, k, v = (F.linear(x, w, b).view(2, length, heads, each).transpose(1, 2) for x, w, b in inputs)
        sums = (q @ k.mT * 0.5 + mask).softmax(-1) @ v
        return F.linear(sums.transpose(1, 2).reshape(2 * length, 8), weights[3], weights[7])

    result = with_gradients(ours, [x.npu() for x in random_inputs(shapes, torch.float32)])
    assert_equal(result, with_gradients(theirs, random_inputs(shapes, torch.float32)), 1e-3)

"""Attention for inference, and the parts of attention that CANN fuses, made of other operators."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

_aten, _npu = torch.ops.aten, torch.ops.npu


def prompt_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    pse_shift: Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    deq_scale1: Tensor | None = None,
    quant_scale1: Tensor | None = None,
    deq_scale2: Tensor | None = None,
    quant_scale2: Tensor | None = None,
    quant_offset2: Tensor | None = None,
    num_heads: int = 1,
    scale_value: float = 1.0,
    pre_tokens: int = 2147483647,
    next_tokens: int = 0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    sparse_mode: int = 0,
) -> Tensor:
    """Rows behind a sequence's end are zeros. Without a mask pre_tokens and next_tokens do not count, as there."""
    if sparse_mode not in (0, 1, 2, 3) or any(
        each is not None for each in (deq_scale1, quant_scale1, deq_scale2, quant_scale2)
    ):
        raise NotImplementedError(
            "the emulated NPU has npu_prompt_flash_attention unquantised, and no band of a mask"
        )
    q = _by_head(query, input_layout, num_heads)
    k, v = (_by_head(each, input_layout, num_key_value_heads or num_heads) for each in (key, value))
    hidden = None if atten_mask is None else _by_batch(atten_mask)
    if atten_mask is not None and sparse_mode == 0:
        hidden = _or(hidden, _outside(q, k, pre_tokens, next_tokens))
    if sparse_mode in (2, 3):  # The triangle begins at the upper left, or ends at the lower right.
        hidden = _outside(q, k, 2147483647, 0 if sparse_mode == 2 else k.size(2) - q.size(2))
    out = _attention(q, k, v, scale_value, pse_shift, _or(hidden, _beyond(actual_seq_lengths_kv, k)))
    if (behind := _beyond(actual_seq_lengths, q)) is not None:
        out = out.masked_fill(behind.mT, 0)
    return _in_layout(out, "BSND" if input_layout == "BNSD_BSND" else input_layout)


def incre_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    pse_shift: Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    antiquant_scale: Tensor | None = None,
    antiquant_offset: Tensor | None = None,
    block_table: Tensor | None = None,
    dequant_scale1: Tensor | None = None,
    quant_scale1: Tensor | None = None,
    dequant_scale2: Tensor | None = None,
    quant_scale2: Tensor | None = None,
    quant_offset2: Tensor | None = None,
    kv_padding_size: Tensor | None = None,
    num_heads: int = 1,
    scale_value: float = 1.0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    block_size: int = 0,
    inner_precise: int = 1,
) -> Tensor:
    """One new position of each sequence. actual_seq_lengths: of the keys and values."""
    refused = (
        antiquant_scale,
        block_table,
        dequant_scale1,
        quant_scale1,
        dequant_scale2,
        quant_scale2,
        kv_padding_size,
    )
    if any(each is not None for each in refused):
        raise NotImplementedError("the emulated NPU has npu_incre_flash_attention unquantised, and not in pages")
    q = _by_head(query, input_layout, num_heads)
    k, v = (_by_head(each, input_layout, num_key_value_heads or num_heads) for each in (key, value))
    hidden = None if atten_mask is None else _by_batch(atten_mask.reshape(q.size(0), 1, 1, -1))
    out = _attention(q, k, v, scale_value, pse_shift, _or(hidden, _beyond(actual_seq_lengths, k)))
    return _in_layout(out, input_layout)


def _by_head(x: Tensor, layout: str, heads: int) -> Tensor:
    """As batch, head, position, number."""
    if layout == "BSH":
        return x.view(x.size(0), x.size(1), heads, -1).transpose(1, 2)
    if layout not in ("BSND", "BNSD", "BNSD_BSND"):
        raise NotImplementedError(f"the emulated NPU has no attention for inference in the layout {layout}")
    return x.transpose(1, 2) if layout == "BSND" else x


def _in_layout(out: Tensor, layout: str) -> Tensor:
    if layout == "BNSD" or layout == "BNSD_BSND":
        return out.contiguous()
    out = out.transpose(1, 2).contiguous()
    return out.flatten(2) if layout == "BSH" else out


def _by_batch(mask: Tensor) -> Tensor:
    mask = mask.bool()
    return mask.unsqueeze(1) if mask.dim() == 3 else mask


def _outside(q: Tensor, k: Tensor, before: int, after: int) -> Tensor:
    """Keys that are further from a query's position than so many."""
    row = torch.arange(q.size(2), device=q.device).unsqueeze(1)
    distance = torch.arange(k.size(2), device=q.device) - row
    return (distance > after) | (distance < -before)


def _beyond(lengths: Sequence[int] | None, x: Tensor) -> Tensor | None:
    """Positions behind the end of each sequence: batch, 1, 1, position."""
    if lengths is None:
        return None
    ends = torch.tensor(list(lengths), device=x.device).expand(x.size(0)) if len(lengths) == 1 else None
    ends = torch.tensor(list(lengths[: x.size(0)]), device=x.device) if ends is None else ends
    return (torch.arange(x.size(2), device=x.device) >= ends.unsqueeze(1)).view(-1, 1, 1, x.size(2))


def _or(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    return first if second is None else second if first is None else first | second


def _attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, shift: Tensor | None, hidden: Tensor | None
) -> Tensor:
    """In float32, and rounded once."""
    groups = q.size(1) // k.size(1)
    k, v = (each.float().repeat_interleave(groups, 1) if groups > 1 else each.float() for each in (k, v))
    scores = q.float() @ k.mT * scale
    if shift is not None:
        scores = scores + shift[..., : q.size(2), : k.size(2)]
    if hidden is not None:
        scores = scores.masked_fill(hidden[..., : q.size(2), : k.size(2)], -math.inf)
    return (scores.softmax(-1) @ v).to(q.dtype)


def masked_softmax_with_rel_pos_bias(
    x: Tensor,
    atten_mask: Tensor | None,
    relative_pos_bias: Tensor,
    scale_value: float = 1.0,
    inner_precision_mode: int = 0,
) -> Tensor:
    scores = x.float() * scale_value + relative_pos_bias
    return (scores if atten_mask is None else scores + atten_mask).softmax(-1).to(x.dtype)


def dropout_with_byte_mask(input: Tensor, p: float) -> tuple[Tensor, Tensor]:
    if not 0 <= p <= 1:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")
    kept = torch.empty(input.shape, device=input.device).bernoulli_(1 - p).to(torch.uint8)
    return dropout_with_byte_mask_backward(input, kept, p), kept


def dropout_with_byte_mask_backward(grad: Tensor, mask: Tensor, p: float) -> Tensor:
    return grad * mask * (1 / (1 - p) if p < 1 else 0.0)


def dropout_if_training(input: Tensor, p: float, train: bool) -> Tensor:
    return _npu._dropout_with_byte_mask(input, p)[0] if train and p > 0 else input


def dropout_mask(
    size: Sequence[int],
    p: float,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Tensor:
    """What dropout will keep, in bits."""
    return _npu._npu_dropout(torch.ones(*size, dtype=dtype, device=device or "npu"), p)[1]  # type: ignore[no-any-return]


def dropout_by_mask(input: Tensor, mask: Tensor, p: float) -> tuple[Tensor, Tensor]:
    return _npu.npu_dropout_backward(input, mask, p), mask


def dropout_with_add_softmax(
    input: Tensor, x1: Tensor, alpha: float, prob: float, dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What dropout kept, in bits, the softmax of x1 + alpha * input, and what dropout leaves of it."""
    softmax = torch.add(x1, input, alpha=alpha).softmax(dim)
    dropped, mask = _npu._npu_dropout(softmax, prob)
    return mask, softmax, dropped


def dropout_with_add_softmax_backward(
    grad: Tensor, mask: Tensor, softmax_out: Tensor, alpha: float, prob: float, dim: int
) -> tuple[Tensor, Tensor]:
    """For what alpha multiplies, and for the other, to which torch_npu gives the gradient that came."""
    before = _npu.npu_dropout_backward(grad, mask, prob)
    return _aten._softmax_backward_data(before, softmax_out, dim, softmax_out.dtype) * alpha, grad


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    attn_mask: Tensor,
    out_proj_weight: Tensor,
    query_bias: Tensor | None,
    key_bias: Tensor | None,
    value_bias: Tensor | None,
    out_proj_bias: Tensor | None,
    dropout_mask: Tensor | None,
    attn_head_num: int,
    attn_dim_per_head: int,
    src_len: int,
    tgt_len: int,
    dropout_prob: float,
    softmax_use_float: bool,
) -> tuple[Tensor, ...]:
    """The result; what dropout kept; query, key and value by head; the softmax, and after dropout; the sum."""

    def by_head(x: Tensor, weight: Tensor, bias: Tensor | None, length: int) -> Tensor:
        projected = linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
        return projected.view(-1, length, attn_head_num, attn_dim_per_head).transpose(1, 2).contiguous()

    q = by_head(query, query_weight, query_bias, tgt_len) * attn_dim_per_head**-0.5
    k, v = by_head(key, key_weight, key_bias, src_len), by_head(value, value_weight, value_bias, src_len)
    scores = (q @ k.mT + attn_mask).softmax(-1, dtype=torch.float32 if softmax_use_float else None)
    if dropout_mask is None:
        probabilities, dropout_mask = _npu._npu_dropout(scores.to(q.dtype), dropout_prob)
    else:
        probabilities = _npu.npu_dropout_backward(scores.to(q.dtype), dropout_mask, dropout_prob)
    context = (probabilities @ v).transpose(1, 2).reshape(query.size(0), -1)
    out_bias = None if out_proj_bias is None else out_proj_bias.to(context.dtype)
    out = linear(context, out_proj_weight.to(context.dtype), out_bias)
    return out, dropout_mask, q, k, v, scores, probabilities, context


def multi_head_attention_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    out_proj_weight: Tensor,
    query_bias: Tensor | None,
    key_bias: Tensor | None,
    value_bias: Tensor | None,
    out_proj_bias: Tensor | None,
    query_res: Tensor,
    key_res: Tensor,
    value_res: Tensor,
    attn_scores: Tensor,
    attn_res: Tensor,
    context: Tensor,
    y_grad: Tensor,
    dropout_mask: Tensor,
    attn_head_num: int,
    attn_dim_per_head: int,
    src_len: int,
    tgt_len: int,
    dropout_prob: float,
    softmax_use_float: bool,
) -> tuple[Tensor, ...]:
    """For four weights, for query, key and value, and for four biases."""
    for_context = y_grad @ out_proj_weight
    for_heads = for_context.view(-1, tgt_len, attn_head_num, attn_dim_per_head).transpose(1, 2)
    for_softmax = _npu.npu_dropout_backward(for_heads @ value_res.mT, dropout_mask, dropout_prob)
    softmax = attn_scores.to(for_softmax.dtype)
    for_scores = _aten._softmax_backward_data(for_softmax, softmax, -1, softmax.dtype)
    by_head = (
        for_scores @ key_res * attn_dim_per_head**-0.5,
        for_scores.mT @ query_res,
        attn_res.mT @ for_heads,
    )
    inputs = ((query, query_weight), (key, key_weight), (value, value_weight))
    for_weights, for_inputs, for_biases = [], [], []
    for grad, (x, weight) in zip(by_head, inputs, strict=True):
        flat = grad.transpose(1, 2).reshape(x.size(0), -1)
        for_weights.append(flat.mT @ x)
        for_inputs.append(flat @ weight)
        for_biases.append(flat.sum(0))
    return *for_weights, y_grad.mT @ context, *for_inputs, *for_biases, y_grad.sum(0)


ATTENTION_FORMULAS: dict[str, Callable[..., Any]] = {
    "npu::npu_prompt_flash_attention": prompt_flash_attention,
    "npu::npu_incre_flash_attention": incre_flash_attention,
    "npu::npu_masked_softmax_with_rel_pos_bias": masked_softmax_with_rel_pos_bias,
    "npu::_dropout_with_byte_mask": dropout_with_byte_mask,
    "npu::_dropout_with_byte_mask_backward": dropout_with_byte_mask_backward,
    "npu::dropout_with_byte_mask": dropout_if_training,
    "npu::npu_dropout_do_mask": dropout_by_mask,
    "npu::npu_dropout_with_add_softmax": dropout_with_add_softmax,
    "npu::npu_dropout_with_add_softmax_backward": dropout_with_add_softmax_backward,
    "npu::npu_multi_head_attention": multi_head_attention,
    "npu::npu_multi_head_attention_backward": multi_head_attention_backward,
}

# Without a tensor to say where it runs, torch_npu's own is a composite.
ATTENTION_FACTORIES: dict[str, Callable[..., Any]] = {"npu::npu_dropout_gen_mask": dropout_mask}

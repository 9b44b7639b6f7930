"""Recurrent networks: operators that CANN computes by aclop, made of others. Gates are in PyTorch's order."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from ascend_emulator.autograd import gradients


def _lstm_step(gates: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    """h, c, the gates i, j, f and o, and tanh(c)."""
    i, f, j, o = gates.chunk(4, -1)
    i, f, j, o = i.sigmoid(), f.sigmoid(), j.tanh(), o.sigmoid()
    c = f * c + i * j
    tanh_c = c.tanh()
    return o * tanh_c, c, i, j, f, o, tanh_c


def _refuse(name: str, **wanted: Any) -> None:
    """wanted: what is asked for besides one layer in one direction."""
    if asked := [option for option, is_wanted in wanted.items() if is_wanted]:
        raise NotImplementedError(f"the emulated NPU has {name} without {', '.join(asked)} only")


def _refuse_options(name: str, num_layers: int, dropout: float, bidirectional: bool, batch_first: bool) -> None:
    layers = num_layers != 1
    _refuse(name, num_layers=layers, dropout=dropout > 0, bidirectional=bidirectional, batch_first=batch_first)


def lstm(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    seq_mask: Tensor,
    h: Tensor,
    c: Tensor,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    flag_seq: bool,
    direction: bool,
) -> tuple[Tensor, ...]:
    """One layer. weight: for the input above that for h. All steps of y, h, c, i, j, f, o and tanh(c)."""
    _refuse_options("npu_lstm", num_layers, dropout, bidirectional, batch_first)
    _refuse("npu_lstm", flag_seq=flag_seq, direction=direction)
    steps = _lstm_steps(input, weight, bias, h, c)
    return steps[0], *steps


def _lstm_steps(input: Tensor, weight: Tensor, bias: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    from_input = input @ weight[: input.size(-1)] + bias
    hidden, cell, steps = h[0], c[0], []
    for at_step in from_input:
        hidden, cell, *rest = _lstm_step(at_step + hidden @ weight[input.size(-1) :], cell)
        steps.append((hidden, cell, *rest))
    return tuple(torch.stack(each) for each in zip(*steps, strict=True))


def lstm_backward(
    grady: Tensor | None,
    gradh: Tensor | None,
    gradc: Tensor | None,
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    hx: Tensor,
    cx: Tensor,
    *kept: Tensor,
) -> tuple[Tensor, ...]:
    """For the input, the weight, the bias, h and c."""

    def of(input: Tensor, weight: Tensor, bias: Tensor, h: Tensor, c: Tensor) -> Tensor:
        hidden, cell, *_ = _lstm_steps(input, weight, bias, h, c)
        return torch.stack([hidden, hidden, cell])

    y, h, c = kept[:3]
    return gradients(of, (input, weight, bias, hx, cx), _stacked((grady, y), (gradh, h), (gradc, c)))


def _stacked(*pairs: tuple[Tensor | None, Tensor]) -> Tensor:
    """Gradients, and zeros like the results that have none."""
    return torch.stack([torch.zeros_like(result) if grad is None else grad for grad, result in pairs])


def lstm_cell(
    input: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    h: Tensor,
    c: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """y, h, c, i, j, f, o and tanh(c), of which h and c have no dimension for the step."""
    hidden, cell, *rest = _lstm_step(linear(input, w_ih.t(), b_ih) + linear(h, w_hh.t(), b_hh), c)
    return hidden.unsqueeze(0), hidden, cell, *(each.unsqueeze(0) for each in rest)


def lstm_cell_backward(
    grady: Tensor | None,
    gradh: Tensor | None,
    gradc: Tensor | None,
    input: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    h: Tensor,
    c: Tensor,
    *kept: Tensor,
) -> tuple[Tensor, ...]:
    """For the input, both weights, both biases, h and c."""
    i, j, f, o, tanh_c = (each.view(h.shape) for each in kept[3:])
    for_hidden = sum(grad.view(h.shape) for grad in (grady, gradh) if grad is not None)
    for_cell = (0 if gradc is None else gradc) + for_hidden * o * (1 - tanh_c * tanh_c)
    for_gates = _for_gates(i, f, j, o, for_hidden * tanh_c, for_cell, c)
    for_bias = for_gates.sum(0)
    weights = (input.mT @ for_gates, h.mT @ for_gates)
    return for_gates @ w_ih.mT, *weights, for_bias, for_bias, for_gates @ w_hh.mT, for_cell * f


def _for_gates(i: Tensor, f: Tensor, j: Tensor, o: Tensor, for_o: Tensor, for_cell: Tensor, c: Tensor) -> Tensor:
    """What the gates' sums get, by what the gates became."""
    return torch.cat(
        [
            for_cell * j * i * (1 - i),
            for_cell * c * f * (1 - f),
            for_cell * i * (1 - j * j),
            for_o * o * (1 - o),
        ],
        -1,
    )


def gru(
    input: Tensor,
    hx: Tensor,
    weight_input: Tensor,
    weight_hidden: Tensor,
    bias_input: Tensor,
    bias_hidden: Tensor,
    seq_length: Tensor,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """One layer. All steps of y, h, the gates update, reset and new, and what new has of the hidden state."""
    _refuse_options("npu_gru", num_layers, dropout, bidirectional, batch_first)
    steps = _gru_steps(input, weight_input, weight_hidden, bias_input, bias_hidden, hx)
    return steps[0], *steps


def _gru_steps(
    input: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, h: Tensor
) -> tuple[Tensor, ...]:
    hidden, steps = h[0], []
    for at_step in input @ w_ih + b_ih:
        of_input, of_hidden = at_step.chunk(3, -1), (hidden @ w_hh + b_hh).chunk(3, -1)
        reset, update = ((of_input[k] + of_hidden[k]).sigmoid() for k in (0, 1))
        new = (of_input[2] + reset * of_hidden[2]).tanh()
        hidden = new + update * (hidden - new)
        steps.append((hidden, update, reset, new, of_hidden[2]))
    return tuple(torch.stack(each) for each in zip(*steps, strict=True))


def gru_backward(
    grady: Tensor | None,
    gradh: Tensor | None,
    input: Tensor,
    weight_input: Tensor,
    weight_hidden: Tensor,
    bias_input: Tensor,
    bias_hidden: Tensor,
    seq_length: Tensor,
    hx: Tensor,
    *kept: Tensor,
) -> tuple[Tensor, ...]:
    """For both weights, the input, both biases and h."""

    def of(w_ih: Tensor, w_hh: Tensor, input: Tensor, b_ih: Tensor, b_hh: Tensor, h: Tensor) -> Tensor:
        hidden = _gru_steps(input, w_ih, w_hh, b_ih, b_hh, h)[0]
        return torch.stack([hidden, hidden])

    y, h = kept[:2]
    inputs = (weight_input, weight_hidden, input, bias_input, bias_hidden, hx)
    return gradients(of, inputs, _stacked((grady, y), (gradh, h)))


def fused_lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What nn.LSTMCell calls: h, c, and the gates for the derivative."""
    gates = input_gates + hidden_gates
    for bias in (input_bias, hidden_bias):
        gates = gates if bias is None else gates + bias
    hidden, cell, i, j, f, o, _ = _lstm_step(gates, cx)
    return hidden, cell, torch.cat([i, f, j, o], -1)


def fused_lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor | None, ...]:
    """For the gates, c and the bias."""
    i, f, j, o = workspace.chunk(4, -1)
    tanh_c = cy.tanh()
    for_hidden = torch.zeros_like(cy) if grad_hy is None else grad_hy
    for_cell = for_hidden * o * (1 - tanh_c * tanh_c)
    if grad_cy is not None:
        for_cell = for_cell + grad_cy
    for_gates = _for_gates(i, f, j, o, for_hidden * tanh_c, for_cell, cx)
    return for_gates, for_cell * f, for_gates.sum(0) if has_bias else None


RECURRENT_FORMULAS: dict[str, Callable[..., Any]] = {
    "npu::npu_lstm": lstm,
    "npu::npu_lstm_backward": lstm_backward,
    "npu::npu_lstm_cell": lstm_cell,
    "npu::npu_lstm_cell_backward": lstm_cell_backward,
    "npu::npu_gru": gru,
    "npu::npu_gru_backward": gru_backward,
    "aten::_thnn_fused_lstm_cell": fused_lstm_cell,
    "aten::_thnn_fused_lstm_cell_backward_impl": fused_lstm_cell_backward,
}

"""Recurrent operators against PyTorch's own on the CPU, whose weights are the transposed ones."""

import pytest
import torch
from torch import Tensor
from torch.nn import LSTMCell

from emulator.tests.compare import assert_equal, on, random_inputs, with_gradients

npu = torch.ops.npu

# torch_npu says once in a process that it would have liked to.
pytestmark = pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format")
STEPS, BATCH, INPUT, HIDDEN = 5, 3, 6, 4
ONE_LAYER = (True, 1, 0.0, True, False, False)


def npu_lstm(x: Tensor, weight: Tensor, bias: Tensor, h: Tensor, c: Tensor) -> Tensor:
    length = torch.tensor([STEPS], dtype=torch.int32, device="npu")
    y, hidden, cell, *_ = npu.npu_lstm(x, weight, bias, length, h, c, *ONE_LAYER, False, False)
    return torch.cat([y, hidden[-1:] * 2, cell[-1:] * 3])


def lstm(x: Tensor, weight: Tensor, bias: Tensor, h: Tensor, c: Tensor) -> Tensor:
    w_ih, w_hh = weight.t()[:, :INPUT].contiguous(), weight.t()[:, INPUT:].contiguous()
    y, hidden, cell = torch.lstm(x, (h, c), (w_ih, w_hh, bias, torch.zeros_like(bias)), *ONE_LAYER)
    return torch.cat([y, hidden * 2, cell * 3])


def npu_gru(x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor) -> Tensor:
    length = torch.tensor([STEPS], dtype=torch.int32, device="npu")
    y, hidden, *_ = npu.npu_gru(x, h, w_ih, w_hh, b_ih, b_hh, length, *ONE_LAYER)
    return torch.cat([y, hidden[-1:] * 2])


def gru(x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor) -> Tensor:
    y, hidden = torch.gru(x, h, (w_ih.t().contiguous(), w_hh.t().contiguous(), b_ih, b_hh), *ONE_LAYER)
    return torch.cat([y, hidden * 2])


def npu_cell(x: Tensor, w_ih: Tensor, w_hh: Tensor, h: Tensor, c: Tensor, b_ih: Tensor, b_hh: Tensor) -> Tensor:
    y, hidden, cell, *_ = npu.npu_lstm_cell(x, w_ih, w_hh, h, c, b_ih, b_hh)
    return torch.stack([y[0], hidden * 2, cell * 3])


def cell(x: Tensor, w_ih: Tensor, w_hh: Tensor, h: Tensor, c: Tensor, b_ih: Tensor, b_hh: Tensor) -> Tensor:
    hidden, cell = torch.lstm_cell(x, (h, c), w_ih.t(), w_hh.t(), b_ih, b_hh)
    return torch.stack([hidden, hidden * 2, cell * 3])


STATE = (1, BATCH, HIDDEN)
CASES = {
    "lstm": (npu_lstm, lstm, [(STEPS, BATCH, INPUT), (INPUT + HIDDEN, 4 * HIDDEN), (4 * HIDDEN,), STATE, STATE]),
    "gru": (
        npu_gru,
        gru,
        [(STEPS, BATCH, INPUT), STATE, (INPUT, 3 * HIDDEN), (HIDDEN, 3 * HIDDEN), (3 * HIDDEN,), (3 * HIDDEN,)],
    ),
    "lstm_cell": (
        npu_cell,
        cell,
        [(BATCH, INPUT), (INPUT, 4 * HIDDEN), (HIDDEN, 4 * HIDDEN), *[(BATCH, HIDDEN)] * 2, *[(4 * HIDDEN,)] * 2],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_torch(name: str) -> None:
    ours, theirs, shapes = CASES[name]
    result = with_gradients(ours, [x.npu() for x in random_inputs(shapes, torch.float32)])
    assert_equal(result, with_gradients(theirs, random_inputs(shapes, torch.float32)), 1e-5)


@pytest.mark.parametrize("bias", [True, False])
def test_a_module_of_one_cell_trains_as_on_the_cpu(bias: bool) -> None:
    torch.manual_seed(3)
    theirs = LSTMCell(INPUT, HIDDEN, bias=bias)
    ours = LSTMCell(INPUT, HIDDEN, bias=bias, device="npu")
    ours.load_state_dict(theirs.state_dict())
    x, h, c = random_inputs([(BATCH, INPUT), (BATCH, HIDDEN), (BATCH, HIDDEN)], torch.float32)
    for module, inputs in ((theirs, (x, h, c)), (ours, on("npu", (x, h, c)))):
        hidden, state = module(inputs[0], inputs[1:])
        (hidden * 2 + state.square()).sum().backward()
    assert_equal([each.grad for each in ours.parameters()], [each.grad for each in theirs.parameters()], 1e-5)


def test_several_layers_are_refused() -> None:
    x, h = torch.ones(STEPS, BATCH, INPUT, device="npu"), torch.ones(STATE, device="npu")
    with pytest.raises(NotImplementedError, match="npu_lstm without num_layers, bidirectional only"):
        npu.npu_lstm(x, x, x, x, h, h, True, 2, 0.0, True, True, False, False, False)

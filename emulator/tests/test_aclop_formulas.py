"""Operators that CANN computes by aclop, made of others: against what their documentation says, on the CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from emulator.tests.compare import assert_equal, constant, random_inputs, with_gradients

npu = torch.ops.npu

SHARES = torch.rand(4, 6, generator=torch.Generator().manual_seed(4)).softmax(1)

# Of the operator on the NPU, and of torch's on the CPU.
SAME: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Any]]] = {
    "reshape": (lambda x: npu.npu_reshape(x, [2, 12]), lambda x: x.reshape(2, 12)),
    "transpose": (lambda x: npu.npu_transpose(x, [1, 0]), lambda x: x.t()),
    "broadcast": (lambda x: npu.npu_broadcast(x[:1], [3, 6]), lambda x: x[:1].expand(3, 6)),
    "slice": (lambda x: npu.npu_slice(x, [1, 2], [2, 3]), lambda x: x[1:3, 2:5]),
    "slice_out": (lambda x: npu.npu_slice(x, [1, 2], [2, 3], out=x.new_empty(0)), lambda x: x[1:3, 2:5]),
    "indexing": (lambda x: npu.npu_indexing(x, [1, 0], [4, 5], [1, 2], 2, 1), lambda x: x[1:, :5:2]),
    "stride_copy": (lambda x: npu.npu_stride_copy(x, [2, 3], [2, 4], 1), lambda x: x.as_strided((2, 3), (2, 4), 1)),
    "pad": (lambda x: npu.npu_pad(x, [1, 2, 3, 4]), lambda x: F.pad(x, [3, 4, 1, 2])),
    "layer_norm_eval": (
        lambda x: npu.npu_layer_norm_eval(x, [6], x[0], x[1]),
        lambda x: F.layer_norm(x, [6], x[0], x[1]),
    ),
    "sign_bits": (
        lambda x: npu.npu_sign_bits_unpack(npu.npu_sign_bits_pack(x.flatten(), 1), 2, torch.float32),
        lambda x: torch.where(x >= 0, 1.0, -1.0).view(2, 12),
    ),
    "sort": (lambda x: npu.npu_sort_v2(x, 1, True), lambda x: x.sort(1, True).values),
}

WITH_GRADIENTS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "silu": (npu.npu_silu, F.silu, [(4, 6)]),
    "mish": (npu.npu_mish, F.mish, [(4, 6)]),
    "max": (lambda x: npu.npu_max(x, 1)[0], lambda x: x.max(1).values, [(4, 6)]),
    "min": (lambda x: npu.npu_min(x, 0, True)[0], lambda x: x.min(0, True).values, [(4, 6)]),
    "bmmV2": (lambda x, y: npu.npu_bmmV2(x, y, []), torch.matmul, [(2, 3, 4), (4, 5)]),
    "linear": (npu.npu_linear, F.linear, [(4, 6), (5, 6), (5,)]),
    "convolution_transpose": (
        lambda x, w, b: npu.npu_convolution_transpose(x, w, b, [1, 1], [0, 0], [2, 2], [1, 1], 1),
        lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1),
        [(2, 3, 5, 5), (3, 4, 3, 3), (4,)],
    ),
    "conv_transpose2d": (
        lambda x, w, b: npu.npu_conv_transpose2d(x, w, b, [0, 0], [0, 0], [1, 1], [2, 2], 1),
        lambda x, w, b: F.conv_transpose2d(x, w, b, dilation=2),
        [(2, 3, 5, 5), (3, 4, 3, 3), (4,)],
    ),
    "softmax_cross_entropy": (
        lambda x: npu.npu_softmax_cross_entropy_with_logits(x, constant(SHARES, x)),
        lambda x: F.cross_entropy(x, SHARES, reduction="none"),
        [(4, 6)],
    ),
    "convolution": (
        lambda x, w: npu.npu_convolution(x, w, None, [1, 1], [1, 1], [1, 1], 1),
        lambda x, w: F.conv2d(x, w, padding=1),
        [(2, 3, 5, 5), (4, 3, 3, 3)],
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_the_result_is_that_of_torch(name: str) -> None:
    (x,) = random_inputs([(4, 6)], torch.float32)
    ours, theirs = SAME[name]
    assert_equal(ours(x.npu()), theirs(x), 1e-6)


# torch_npu's mish asks for a private format, whether it may or not.
@pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format")
@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_results_and_gradients_are_those_of_torch(name: str) -> None:
    ours, theirs, shapes = WITH_GRADIENTS[name]
    inputs = random_inputs(shapes, torch.float32)
    result = with_gradients(ours, [each.npu() for each in inputs])
    assert_equal(result, with_gradients(theirs, inputs), 1e-6)


def test_places_of_extremes_are_of_int32() -> None:
    (x,) = random_inputs([(4, 6)], torch.float32)
    places = npu.npu_min(x.npu(), 1)[1]
    assert places.dtype == torch.int32
    assert_equal(places.long(), x.min(1).indices)


def test_one_hot_has_its_values_along_the_dimension_asked_for() -> None:
    x = torch.tensor([[5, 0], [1, 2]])
    expected = torch.where(x.unsqueeze(-1) == torch.arange(3), 7.0, -1.0)
    assert_equal(npu.npu_one_hot(x.npu(), -1, 3, 7, -1), expected)
    assert_equal(npu.npu_one_hot(x.npu(), 0, 3, 7, -1), expected.permute(2, 0, 1))


def test_updates_are_put_where_each_batch_says() -> None:
    x, updates = random_inputs([(2, 3, 8, 4), (2, 3, 2, 4)], torch.float32)
    expected = x.clone()
    expected[0, :, 1:3], expected[1, :, 5:7] = updates[0], updates[1]
    starts, ours = torch.tensor([1, 5]).npu(), x.npu()
    assert_equal(npu.scatter_update(ours, starts, updates.npu(), -2), expected)
    assert_equal(ours, x)
    assert_equal(npu.scatter_update_(ours, starts, updates.npu(), -2), expected)
    assert_equal(ours, expected)


def test_updates_are_put_at_coordinates() -> None:
    x, updates = random_inputs([(4, 5, 6), (2, 6)], torch.float32)
    places = torch.tensor([[1, 2], [3, 0]])
    expected = x.clone()
    expected[places[:, 0], places[:, 1]] = updates
    assert_equal(npu.npu_scatter_nd_update(x.npu(), places.npu(), updates.npu()), expected)


def test_bits_of_signs_begin_with_the_lowest() -> None:
    x = torch.tensor([1.0, -1, -1, 2, -3, -4, -5, -6, 0])
    assert_equal(npu.npu_sign_bits_pack(x.npu(), 2), torch.tensor([[0b1001], [1]], dtype=torch.uint8))


def test_no_number_has_become_too_large() -> None:
    status = npu.npu_get_float_status(npu.npu_alloc_float_status(torch.ones(1, device="npu")))
    assert status.tolist() == [0] * 8
    assert npu.npu_clear_float_status(status).tolist() == [0] * 8


def test_the_status_of_a_device_that_saturates_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INF_NAN_MODE_FORCE_DISABLE", "1")
    with pytest.raises(NotImplementedError, match="does not saturate"):
        npu.npu_get_float_status(torch.ones(8, device="npu"))

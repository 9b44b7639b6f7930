"""An operator that is not native runs on the CPU, or says that it cannot."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from emulator.tests.compare import assert_equal, on, random_inputs, with_gradients

FALLBACK: dict[str, Callable[..., Any]] = {
    "results": lambda a: a.cummax(1),
    "in_place": lambda a: a.cumprod_(1),
    "in_place_view": lambda a: a[:, 1:3].cumprod_(0),
    "in_place_twice_the_same": lambda a: a.atan2_(a),
    "out": lambda a: torch.cumprod(a, 0, out=torch.empty_like(a)),
    "out_resized": lambda a: torch.cumprod(a, 0, out=a.new_empty(0)),
    "outs": lambda a: torch.cummin(a, 0, out=(torch.empty_like(a), torch.empty_like(a, dtype=torch.int64))),
    "index_by_mask": lambda a: a[a > 0],
    "index_put_by_mask": lambda a: a.index_put_((a > 0,), a[a > 0] * 2),
    "index_put_number_by_mask": lambda a: a.__setitem__(a > 0, 7.0),
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
    assert x.cumprod_(0) is x
    assert torch.cumprod(x, 0, out=out) is out


def test_convolution_runs_on_the_cpu_where_private_formats_are_allowed(caplog: pytest.LogCaptureFixture) -> None:
    images, weight = random_inputs([(2, 3, 6, 6), (4, 3, 3, 3)], torch.float32)
    torch.npu.config.allow_internal_format = True
    try:
        with caplog.at_level(logging.DEBUG, logger="ascend_emulator.fallback"):
            result = F.conv2d(images.to("npu"), weight.to("npu"))
    finally:
        torch.npu.config.allow_internal_format = False
    assert "aten.convolution.default" in caplog.text
    assert_equal(result, F.conv2d(images, weight))


def test_fallback_has_gradients() -> None:
    def function(a: Tensor) -> Tensor:
        return a.cummax(1).values.cumprod(0) + F.kl_div(a.log_softmax(1), a.softmax(1), reduction="sum")

    inputs = random_inputs([(4, 5)], torch.float32)
    expected = with_gradients(function, on("cpu", inputs))
    assert_equal(with_gradients(function, on("npu", inputs)), expected)


def test_an_operator_without_any_kernel_says_its_name() -> None:
    x = torch.ones(2, 4, device="npu")
    with pytest.raises(NotImplementedError, match="the emulated NPU has no kernel for npu::npu_nms_v4"):
        torch.ops.npu.npu_nms_v4(x, x[:, 0], 2, x[0, 0], x[0, 0])
    with pytest.raises(NotImplementedError, match="aten::_masked_scale"):
        torch._masked_scale(x, x.bool(), 0.5)


def test_an_error_of_the_cpu_says_which_operator_the_emulator_ran_there() -> None:
    x, there = torch.zeros(2, 2, device="npu"), "which the emulated NPU runs on the CPU: "
    with pytest.raises(RuntimeError, match=r"^aten\.\S+ of complex64, int64, " + there + r".*not implemented"):
        x.to(torch.complex64).cummax(0)
    with pytest.raises(IndexError, match=r"^aten\.\S+ of float32, int64, " + there + ".*out of range"):
        x.take(torch.tensor([9], device="npu"))

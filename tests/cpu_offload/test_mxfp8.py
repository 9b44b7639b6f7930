"""The tests' own quantized tensors and layers are what they say they are."""

from __future__ import annotations

import pytest
import torch

from tests.cpu_offload.conftest import MakeTensor
from tests.cpu_offload.layers import Saving, call, input_shape, layer_names, make_layer, saving
from tests.cpu_offload.mxfp8 import BLOCK, MXFP8Quantizer, TwoParts, bits, same_bits

pytestmark = pytest.mark.usefixtures("no_gc")


def test_the_bits_are_those_of_e4m3(device: str) -> None:
    x = torch.randn(64, 96) * torch.logspace(-20, 20, 64).unsqueeze(1)
    x[3] = 0
    blocks = x.unflatten(-1, (-1, BLOCK))
    scale = (blocks.abs().amax(-1, keepdim=True) / 448).clamp(min=2.0**-126).log2().ceil()
    expected = (blocks / torch.exp2(scale)).to(torch.float8_e4m3fn).view(torch.uint8).flatten(-2)
    parts = MXFP8Quantizer()(x.to(device)).parts()
    assert torch.equal(parts[0].cpu(), expected)
    assert torch.equal(parts[2].cpu(), (scale.squeeze(-1) + 127).to(torch.uint8))


def test_a_tensor_is_nearly_what_it_was(make_tensor: MakeTensor) -> None:
    x = make_tensor()
    quantized = MXFP8Quantizer()(x)
    assert (quantized.shape, quantized.dtype, quantized.device) == (x.shape, x.dtype, x.device)
    torch.testing.assert_close(quantized.dequantize(), x, rtol=1 / 16, atol=1 / 64)
    again = MXFP8Quantizer()(quantized.dequantize())
    assert torch.equal(again, quantized), "a second time nothing is lost"


def test_two_parts_hold_more_than_one(make_tensor: MakeTensor) -> None:
    x = make_tensor().float() * 1.001
    parts = TwoParts.of(x)
    torch.testing.assert_close(parts.dequantize(), x, rtol=2.0**-16, atol=0)
    assert not torch.equal(parts.high.float(), x)


def test_parts_are_taken_out_and_put_back(make_tensor: MakeTensor) -> None:
    quantized = make_tensor("mxfp8")
    before = bits(quantized)
    parts, empty = quantized.detach().prepare_for_saving()
    assert same_bits(bits(quantized), before), "a detached one has its own hold on the parts"
    assert empty.get_data_tensors() == (None, None)
    with pytest.raises(ValueError, match="not there"):
        empty.dequantize()
    left = empty.restore_from_saved([*parts, parts[0]])
    assert len(left) == 1
    assert left[0] is parts[0]
    assert same_bits(bits(empty), before)


def test_a_storage_has_the_same_parts(make_tensor: MakeTensor) -> None:
    x = make_tensor()
    tensor, storage = MXFP8Quantizer()(x), MXFP8Quantizer().storage(x)
    assert not isinstance(storage, torch.Tensor)
    for a, b in zip(tensor.parts(), storage.parts(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("how", Saving)
@pytest.mark.parametrize("name", layer_names())
def test_layers_have_the_same_gradients_each_time(device: str, name: str, how: Saving) -> None:
    torch.manual_seed(0)
    layer = make_layer(name, device)
    x = torch.randn(input_shape(name)).bfloat16().to(device).requires_grad_()
    results = []
    for _ in range(2):
        with saving(how):
            y = call(layer, x)
        y.backward(x.detach())
        results.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
        layer.zero_grad()
        x.grad = None
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("how", Saving)
@pytest.mark.parametrize("name", layer_names())
def test_layers_have_the_gradients_of_the_cpu(device: str, name: str, how: Saving) -> None:
    torch.manual_seed(0)
    layer, reference = make_layer(name, device), make_layer(name, "cpu")
    reference.load_state_dict(layer.state_dict())
    x = torch.randn(input_shape(name)).bfloat16()
    results = []
    for some, place in ((layer, device), (reference, "cpu")):
        mine = x.to(place).detach().requires_grad_()
        with saving(how if some is layer else Saving.PLAIN):
            y = call(some, mine)
        y.backward(x.to(place))
        results.append([y.detach().cpu(), mine.grad.cpu(), *(p.grad.cpu() for p in some.parameters())])
    for mine, theirs in zip(*results, strict=True):
        apart = (mine.float() - theirs.float()).norm() / theirs.float().norm()
        assert apart < (0.01 if how is Saving.PLAIN else 0.08)

"""Whole layers under the offload context: bit-equal numbers, and device memory to the byte."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.cpu_offload.conftest import LEAST_ELEMENTS, MIB, Memory
from tests.cpu_offload.layers import Saving, call, input_shape, layer_names, make_layer, saving
from tests.cpu_offload.mxfp8 import parts_of
from tests.models import eventually

Offloading = Callable[..., Any]

pytestmark = [
    pytest.mark.usefixtures("no_gc"),
    pytest.mark.filterwarnings(
        "ignore:num_layers=1 of model_layers=2:UserWarning"
    ),  # models of two layers are enough here
    pytest.mark.detector_only(why="takes long"),
    pytest.mark.schedules("eager", "random", why="it takes long, and the random one waits as late"),
]


in_each_way = pytest.mark.parametrize(
    "how",
    [
        Saving.PLAIN,
        pytest.param(Saving.QUANTIZED, marks=pytest.mark.slow(why="the same layers with another tensor")),
        Saving.IN_PARTS,
    ],
)


def input_of(name: str, device: str, *, requires_grad: bool = False) -> torch.Tensor:
    return torch.randn(input_shape(name)).bfloat16().to(device).requires_grad_(requires_grad)


def train(
    layers: list[nn.Module], x: torch.Tensor, how: Saving, context: Any = None, sync: Any = None
) -> list[torch.Tensor]:
    """One step: the output, the gradient of the input if it has one, and those of all parameters."""
    out = x
    for layer in layers:
        if context is None:
            with saving(how):
                out = call(layer, out)
        else:
            with context, saving(how):
                out = call(layer, out)
            out = sync(out)
    result = out.detach().cpu()
    (out * 2).sum().backward()
    gradients = [p.grad for layer in layers for p in layer.parameters()] + [x.grad] * x.requires_grad
    results = [result, *(gradient.cpu() for gradient in gradients)]
    x.grad = None
    for layer in layers:
        layer.zero_grad()
    return results


def all_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@in_each_way
@pytest.mark.parametrize("name", layer_names())
def test_ten_layers_have_the_same_gradients(device: str, offloading: Offloading, name: str, how: Saving) -> None:
    torch.manual_seed(0)
    layers = [make_layer(name, device) for _ in range(10)]
    x = input_of(name, device)
    expected = train(layers, x, how)
    context, sync = offloading(num_layers=6, model_layers=10)
    assert all_equal(train(layers, x, how, context, sync), expected)


@in_each_way
@pytest.mark.parametrize(("name", "retain"), [(name, False) for name in layer_names()] + [("layernorm_mlp", True)])
def test_each_iteration_has_the_same_gradients(
    device: str, offloading: Offloading, memory: Memory, name: str, how: Saving, retain: bool
) -> None:
    torch.manual_seed(0)
    layers = [make_layer(name, device) for _ in range(2)]
    xs = [input_of(name, device, requires_grad=True) for _ in range(2)]
    expected = [train(layers, x, how) for x in xs]
    context, sync = offloading(num_layers=1, model_layers=2, retain_pinned_cpu_buffers=retain)
    start = memory.used()
    for x, right in zip(xs, expected, strict=True):
        assert all_equal(train(layers, x, how, context, sync), right)
        assert eventually(lambda: memory.used() == start)


def saved_for_backward(run: Callable[[], object]) -> list[int]:
    """Bytes of each tensor that is saved and large enough to be moved; one that is saved twice counts once."""
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        for part in parts_of(tensor):
            if part.numel() >= LEAST_ELEMENTS:
                found[part.data_ptr()] = part.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = run()
    del kept
    return list(found.values())


@pytest.mark.parametrize("how", Saving)
@pytest.mark.parametrize("name", layer_names())
def test_all_that_a_layer_saved_is_gone_from_the_device(
    device: str, offloading: Offloading, memory: Memory, name: str, how: Saving
) -> None:
    torch.manual_seed(0)
    layer = make_layer(name, device)
    x = input_of(name, device)

    def forward(x: torch.Tensor) -> torch.Tensor:
        with saving(how):
            return call(layer, x)

    out = forward(x)
    out.sum().backward()
    sizes = saved_for_backward(partial(forward, x))
    assert sum(sizes) >= x.nbytes // 2, "the input at least, in one byte or two for each element"
    del out, x

    start = memory.used()
    x = input_of(name, device)
    out = forward(x) + 1
    del x
    without = memory.used() - start
    out.sum().backward()
    del out
    assert eventually(lambda: memory.used() == start)

    context, sync = offloading(num_layers=1, model_layers=2)
    x = input_of(name, device)
    with context, saving(how):
        out = call(layer, x)
    out = sync(out)
    with context:
        out = out + 1
    out = sync(out)
    del x
    # A grouped input is one tensor of which each group saves a part.
    taken = memory.of(sum(sizes)) if name == "grouped_linear" and how is Saving.PLAIN else memory.of(*sizes)
    assert without - (memory.used() - start) == taken
    assert context.offload_synchronizer.get_offloaded_total_size_mb() == sum(sizes) / MIB
    out.sum().backward()
    del out
    assert eventually(lambda: memory.used() == start)
    assert context.offload_synchronizer.get_offloaded_total_size_mb() == 0


def test_large_weights_stay(device: str, offloading: Offloading, memory: Memory) -> None:
    """A linear layer saves its weight as a view that is no parameter."""
    layers = [nn.Linear(1024, 1024, device=device, dtype=torch.bfloat16) for _ in range(3)]
    addresses = {layer.weight.data_ptr() for layer in layers}
    context, sync = offloading(num_layers=1, model_layers=3)
    out = torch.randn(512, 1024).bfloat16().to(device).requires_grad_()
    nbytes = out.nbytes
    for layer in layers:
        with context:
            out = layer(out)
        out = sync(out)
    assert context.offload_synchronizer.get_offloaded_total_size_mb() == nbytes / MIB
    out.sum().backward()
    assert {layer.weight.data_ptr() for layer in layers} == addresses


def test_small_tensors_stay(device: str, offloading: Offloading) -> None:
    context, sync = offloading(num_layers=1, model_layers=3)
    out = torch.randn(511, 512).to(device).requires_grad_()
    for _ in range(3):
        with context:
            out = out.sin()
        out = sync(out)
    assert context.offload_synchronizer.get_offloaded_total_size_mb() == 0
    out.sum().backward()


@pytest.mark.parametrize("width", [128, 512])
def test_an_operation_that_saves_its_output_is_no_cycle(
    device: str, offloading: Offloading, memory: Memory, width: int
) -> None:
    """Neither where the output moves, nor where it is too small to."""
    x = torch.randn(width, width).to(device).requires_grad_()
    start = memory.used()
    context, sync = offloading(num_layers=1, model_layers=3)
    out = x
    for _ in range(3):
        with context:
            out = out.sigmoid()
        out = sync(out)
    del out, context, sync
    assert memory.used() == start


def test_layers_of_different_kinds(device: str, offloading: Offloading) -> None:
    torch.manual_seed(0)
    layers = [make_layer(name, device) for name in layer_names()]
    x = input_of("grouped_linear", device, requires_grad=True)
    expected = train(layers, x, Saving.QUANTIZED)
    context, sync = offloading(num_layers=2, model_layers=len(layers))
    for _ in range(2):
        assert all_equal(train(layers, x, Saving.QUANTIZED, context, sync), expected)

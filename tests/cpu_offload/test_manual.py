"""Manual synchronization: the user says when each layer leaves and comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.cpu_offload.conftest import MIB, MakeTensor, Memory
from tests.cpu_offload.layers import (
    SHAPE,
    L2Normalization,
    Saving,
    call,
    input_shape,
    layer_names,
    make_layer,
    saving,
)
from tests.models import eventually
from tiered_mem.cpu_offload import mark_not_offload

Offloading = Callable[..., Any]

pytestmark = [
    pytest.mark.usefixtures("no_gc"),
    pytest.mark.detector_only(why="takes long"),
]


def gradients_of(layers: list[torch.nn.Module]) -> list[torch.Tensor]:
    taken = [p.grad.cpu() for layer in layers for p in layer.parameters()]
    for layer in layers:
        layer.zero_grad()
    return taken


def all_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def leave(controller: Any, layer: int) -> None:
    controller.start_offload_layer(layer)
    controller.release_activation_forward_gpu_memory(layer)


@pytest.mark.parametrize("how", Saving)
@pytest.mark.parametrize("name", layer_names())
def test_layers_leave_and_come_back_as_they_are_told(
    device: str, offloading: Offloading, memory: Memory, name: str, how: Saving
) -> None:
    torch.manual_seed(0)
    layers = [make_layer(name, device) for _ in range(2)]
    inputs = [torch.randn(input_shape(name)).bfloat16() for _ in layers]
    for layer, x in zip(layers, inputs, strict=True):
        with saving(how):
            call(layer, x.to(device)).sum().backward()
    expected = gradients_of(layers)

    context, sync, controller = offloading(model_layers=6, manual_synchronization=True)
    outputs = []
    for layer, x in zip(layers, inputs, strict=True):
        with context, saving(how):
            out = call(layer, x.to(device))
        outputs.append(sync(out))
    del out
    mark_not_offload(*outputs)  # nobody saves them
    before = memory.used()
    assert controller.get_offloaded_total_size_mb() == 0
    leave(controller, 0)
    leave(controller, 1)
    after = memory.used()
    nbytes = controller.get_offloaded_total_size_mb() * MIB
    assert nbytes >= 2 * inputs[0].numel(), "one byte at least for each element of both inputs"
    rounded = nbytes * 1.01  # the allocator rounds up
    assert nbytes <= before - after <= rounded
    controller.start_reload_layer(0)
    controller.start_reload_layer(1)
    assert nbytes <= memory.used() - after <= rounded
    for out in outputs:
        out.sum().backward()
    assert all_equal(gradients_of(layers), expected)


def test_the_input_of_a_normalization_leaves(device: str, offloading: Offloading, memory: Memory) -> None:
    torch.manual_seed(0)
    x = torch.randn(512, 512).bfloat16().to(device).requires_grad_()
    other = x.detach().clone().requires_grad_()
    gradient = torch.randn(512, 512).bfloat16().to(device)
    y = L2Normalization()(x)
    y.backward(gradient)
    context, sync, controller = offloading(model_layers=1, manual_synchronization=True)
    with context:
        out = L2Normalization()(other)
    out = sync(out)
    leave(controller, 0)
    assert context.offload_synchronizer.get_offloaded_total_size_mb() * MIB == x.nbytes
    controller.start_reload_layer(0)
    out.backward(gradient)
    assert torch.equal(out, y)
    assert torch.equal(other.grad, x.grad)


@pytest.mark.parametrize("order", ["first_to_last", "last_to_first"])
def test_the_example_of_the_documentation(
    device: str, device_module: Any, offloading: Offloading, memory: Memory, order: str
) -> None:
    num_layers = 10
    torch.manual_seed(0)
    layers = [make_layer("linear", device) for _ in range(num_layers)]
    inputs = [torch.randn(SHAPE).bfloat16() for _ in layers]
    for layer, x in zip(layers, inputs, strict=True):
        layer(x.to(device)).sum().backward()
    expected = gradients_of(layers)
    stream = device_module.Stream()
    context, sync, controller = offloading(
        model_layers=num_layers, manual_synchronization=True, offload_stream=stream
    )
    start = memory.used()
    outputs = []
    for i, layer in enumerate(layers):
        with context:
            out = layer(inputs[i].to(device))
        outputs.append(sync(out))
        controller.start_offload_layer(i)
    del out
    stream.synchronize()
    size = memory.of(inputs[0].to(device).nbytes)
    assert memory.used() == start + 2 * num_layers * size
    for i in range(num_layers):
        controller.release_activation_forward_gpu_memory(i)
    assert memory.used() == start + num_layers * size, "the outputs are what is left"
    assert controller.get_offloaded_total_size_mb() == num_layers * inputs[0].nbytes / MIB
    for i in reversed(range(num_layers)):
        controller.start_reload_layer(i)
    stream.synchronize()
    for i in range(num_layers) if order == "first_to_last" else reversed(range(num_layers)):
        outputs[i].sum().backward()
    outputs.clear()
    assert all_equal(gradients_of(layers), expected)
    assert eventually(lambda: memory.used() == start)
    assert controller.get_offloaded_total_size_mb() == 0


def test_a_layer_that_is_never_offloaded_stays(
    device: str, offloading: Offloading, make_tensor: MakeTensor, memory: Memory
) -> None:
    torch.manual_seed(0)
    layers = [make_layer("linear", device) for _ in range(3)]
    x = make_tensor()

    def forward(context: Any = None, sync: Any = None) -> torch.Tensor:
        out = x
        for layer in layers:
            if context is None:
                out = layer(out)
            else:
                with context:
                    out = layer(out)
                out = sync(out)
        return out

    forward().sum().backward()
    expected = gradients_of(layers)
    context, sync, controller = offloading(model_layers=3, manual_synchronization=True)
    for _ in range(2):
        out = forward(context, sync)
        before = memory.used()
        leave(controller, 1)
        assert before - memory.used() == memory.of(x.nbytes)
        controller.start_reload_layer(1)
        out.sum().backward()
        del out
        assert all_equal(gradients_of(layers), expected)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_microbatches_in_flight_have_layers_of_their_own(
    device: str, offloading: Offloading, make_tensor: MakeTensor, memory: Memory, order: tuple[int, ...]
) -> None:
    """As in a pipeline: model_layers is the layers of one microbatch times the microbatches."""
    torch.manual_seed(0)
    layers = [make_layer("layernorm_mlp", device) for _ in range(2)]
    inputs = [make_tensor() for _ in order]
    expected = []
    for x in inputs:
        layers[1](layers[0](x)).sum().backward()
        expected.append(gradients_of(layers))
    context, sync, controller = offloading(model_layers=2 * len(order), manual_synchronization=True)
    start = memory.used()
    for _ in range(2):
        outputs = []
        for microbatch, x in enumerate(inputs):
            out = x
            for i, layer in enumerate(layers):
                with context:
                    out = layer(out)
                out = sync(out)
                controller.start_offload_layer(2 * microbatch + i)
                controller.release_activation_forward_gpu_memory(2 * microbatch + i)
            outputs.append(out)
        del out
        for microbatch in order:
            controller.start_reload_layer(2 * microbatch + 1)
            controller.start_reload_layer(2 * microbatch)
            outputs[microbatch].sum().backward()
            outputs[microbatch] = inputs[microbatch]
            assert all_equal(gradients_of(layers), expected[microbatch])
        assert eventually(lambda: memory.used() == start)


WRONG_ORDERS = {
    "release before start": ("release_activation_forward_gpu_memory",),
    "reload before start": ("start_reload_layer",),
    "start twice": ("start_offload_layer", "start_offload_layer"),
    "reload before release": ("start_offload_layer", "start_reload_layer"),
}


@pytest.mark.parametrize("order", WRONG_ORDERS.values(), ids=WRONG_ORDERS)
def test_a_wrong_order_of_calls_is_refused(
    device: str, offloading: Offloading, make_tensor: MakeTensor, order: tuple[str, ...]
) -> None:
    context, sync, controller = offloading(model_layers=2, manual_synchronization=True)
    with context:
        out = make_layer("linear", device)(make_tensor())
    sync(out)
    for name in order[:-1]:
        getattr(controller, name)(0)
    with pytest.raises(RuntimeError, match="Invalid state"):
        getattr(controller, order[-1])(0)


@pytest.mark.parametrize(
    "name", ["start_offload_layer", "release_activation_forward_gpu_memory", "start_reload_layer"]
)
def test_a_layer_that_does_not_exist_is_refused(offloading: Offloading, name: str) -> None:
    context, _, controller = offloading(model_layers=2, manual_synchronization=True)
    with pytest.raises(RuntimeError):
        getattr(controller, name)(0)
    with context:
        pass
    with pytest.raises(RuntimeError, match="layer 7"):
        getattr(controller, name)(7)

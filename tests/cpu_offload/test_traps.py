"""Uses that the interface was not made for. Numbers are right, or there is an error; they are never wrong."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.cpu_offload.conftest import HOST_BYTES, MakeTensor, Memory
from tests.cpu_offload.layers import make_layer
from tiered_mem.cpu_offload import DefaultOffloadSynchronizer, OffloadableLayerState, start_offload

pytestmark = pytest.mark.usefixtures("no_gc")

Offloading = Callable[..., Any]
LAYERS = 4


def right_or_refused(answer: Callable[[], torch.Tensor], expected: torch.Tensor) -> None:
    try:
        tensor = answer()
    except RuntimeError:
        return
    assert torch.equal(tensor.cpu(), expected.cpu())


@pytest.fixture
def layers(device: str) -> list[nn.Module]:
    torch.manual_seed(0)
    return [make_layer("layernorm_linear", device) for _ in range(LAYERS)]


def forward(layers: list[nn.Module], x: torch.Tensor, context: Any, sync: Any) -> torch.Tensor:
    for layer in layers:
        with context:
            x = layer(x)
        x = sync(x)
    return x


def gradient_of(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    x.grad = None
    out.sum().backward()
    assert x.grad is not None
    return x.grad


def plain_gradient(layers: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    out = x
    for layer in layers:
        out = layer(out)
    return gradient_of(x, out)


@pytest.mark.parametrize("first", [0, 1])
def test_two_graphs_in_flight_through_the_synchronizer(make_tensor: MakeTensor, first: int) -> None:
    synchronizer = DefaultOffloadSynchronizer(num_layers=LAYERS, num_offloaded_layers=2, host_bytes=HOST_BYTES)
    graphs = []
    for _ in range(2):
        pushed = []
        for _ in range(LAYERS):
            synchronizer.fwd_step()
            tensor = make_tensor()
            pushed.append((synchronizer.push_tensor(tensor), tensor.cpu()))
        graphs.append(pushed)
    del tensor
    for graph in (first, 1 - first):
        for layer in reversed(range(LAYERS)):
            i, expected = graphs[graph][layer]

            def step(layer: int = layer, i: int = i) -> torch.Tensor:
                synchronizer.bwd_step(layer)
                return synchronizer.pop_tensor(i)

            right_or_refused(step, expected)
        synchronizer.finish_part_of_bwd()


@pytest.mark.parametrize("first", [0, 1])
def test_two_graphs_in_flight_through_the_context(
    offloading: Offloading, make_tensor: MakeTensor, layers: list[nn.Module], first: int
) -> None:
    xs = [make_tensor().requires_grad_() for _ in range(2)]
    expected = [plain_gradient(layers, x) for x in xs]
    context, sync = offloading(num_layers=2, model_layers=LAYERS)
    outs = [forward(layers, x, context, sync) for x in xs]
    for graph in (first, 1 - first):
        assert torch.equal(gradient_of(xs[graph], outs[graph]), expected[graph])


@pytest.mark.parametrize("offloaded", [1, 2])
def test_a_second_output_that_is_used_at_the_end(
    offloading: Offloading, make_tensor: MakeTensor, layers: list[nn.Module], offloaded: int
) -> None:
    """Its backward runs first, before that of any layer has been announced."""
    x = make_tensor().requires_grad_()
    out = x
    for layer in layers:
        out = layer(out)
    expected = gradient_of(x, out + x.sin())
    context, sync = offloading(num_layers=offloaded, model_layers=LAYERS)
    out = x
    for i, layer in enumerate(layers):
        with context:
            out = layer(out)
            if i == 0:
                second = x.sin()
        out = sync(out)
    assert torch.equal(gradient_of(x, out + second), expected)


def test_a_tensor_that_is_changed_before_its_copy_is_refused(
    state: OffloadableLayerState, make_tensor: MakeTensor
) -> None:
    x = make_tensor()
    i = state.push_tensor(x)
    x.fill_(1)
    state.start_offload()
    state.release_activation_forward_gpu_memory()
    state.start_reload()
    with pytest.raises(RuntimeError, match="changed in place"):
        state.pop_tensor(i)


def test_a_tensor_that_is_changed_after_its_copy(
    device_module: Any, state: OffloadableLayerState, make_tensor: MakeTensor
) -> None:
    x = make_tensor()
    expected = x.cpu()
    i = state.push_tensor(x)
    state.start_offload()
    device_module.synchronize()  # or the change would race with the copy
    x.fill_(1)
    state.release_activation_forward_gpu_memory()
    state.start_reload()
    right_or_refused(lambda: state.pop_tensor(i), expected)


def test_a_buffer_that_was_announced_with_its_last_contents(
    state: OffloadableLayerState, make_tensor: MakeTensor
) -> None:
    """What start_offload said of it holds no more once it is written again."""
    x = make_tensor()
    other = make_tensor()
    expected = other.cpu()
    start_offload(x)
    busy = make_tensor(shape=(512, 512))
    for _ in range(20):
        busy = busy @ busy
    x.copy_(other)
    i = state.push_tensor(x)
    del x
    state.start_offload()
    state.release_activation_forward_gpu_memory()
    state.start_reload()
    assert torch.equal(state.pop_tensor(i).cpu(), expected)


def test_the_memory_of_tensors_that_nobody_asked_for_is_used_again(
    device_module: Any, state: OffloadableLayerState, make_tensor: MakeTensor, memory: Memory
) -> None:
    """It is still being written by the copy when it is given up."""
    start = memory.used()
    state.push_tensor(make_tensor())
    state.start_offload()
    state.release_activation_forward_gpu_memory()
    state.start_reload()
    state.release_all_memory()
    assert memory.used() == start
    others = [make_tensor().fill_(3) for _ in range(4)]
    device_module.synchronize()
    assert all(bool((other == 3).all()) for other in others)


@pytest.mark.parametrize("begun", range(LAYERS + 1))
@pytest.mark.parametrize("cycle", [True, False])
def test_a_synchronizer_that_is_dropped_leaves_nothing(
    make_tensor: MakeTensor, memory: Memory, begun: int, cycle: bool
) -> None:
    """Even if only the garbage collector finds it, which finds all that belongs to it at the same time."""
    start = memory.used()
    synchronizer = DefaultOffloadSynchronizer(LAYERS, 3, host_bytes=HOST_BYTES)
    for _ in range(begun):
        synchronizer.fwd_step()
        synchronizer.push_tensor(make_tensor())
    if cycle:
        circle: list[object] = [synchronizer]
        circle.append(circle)
        del circle
    del synchronizer
    gc.collect()
    assert memory.used() == start


def test_a_second_backward_through_the_same_graph(
    offloading: Offloading, make_tensor: MakeTensor, layers: list[nn.Module]
) -> None:
    x = make_tensor().requires_grad_()
    expected = plain_gradient(layers, x)
    context, sync = offloading(num_layers=2, model_layers=LAYERS)
    out = forward(layers, x, context, sync)
    x.grad = None
    out.sum().backward(retain_graph=True)
    assert torch.equal(x.grad, expected)
    assert torch.equal(gradient_of(x, out), expected)


@pytest.mark.parametrize("completed", [1, 2, 3])
def test_a_forward_that_ends_early(
    offloading: Offloading, make_tensor: MakeTensor, layers: list[nn.Module], completed: int
) -> None:
    x = make_tensor().requires_grad_()
    expected = plain_gradient(layers, x)
    shorter = plain_gradient(layers[:completed], x)
    context, sync = offloading(num_layers=2, model_layers=LAYERS)
    for _ in range(2):
        assert torch.equal(gradient_of(x, forward(layers[:completed], x, context, sync)), shorter)
        assert torch.equal(gradient_of(x, forward(layers, x, context, sync)), expected)


@pytest.mark.parametrize("failing", range(LAYERS))
def test_an_iteration_after_an_exception(
    offloading: Offloading, make_tensor: MakeTensor, layers: list[nn.Module], failing: int
) -> None:
    x = make_tensor().requires_grad_()
    expected = plain_gradient(layers, x)
    context, sync = offloading(num_layers=2, model_layers=LAYERS)

    def fail(module: nn.Module, inputs: object) -> None:
        raise KeyboardInterrupt

    hook = layers[failing].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        forward(layers, x, context, sync)
    hook.remove()
    for _ in range(2):
        assert torch.equal(gradient_of(x, forward(layers, x, context, sync)), expected)


def test_an_evaluation_between_two_steps(
    offloading: Offloading, make_tensor: MakeTensor, layers: list[nn.Module], memory: Memory
) -> None:
    x = make_tensor().requires_grad_()
    expected = plain_gradient(layers, x)
    context, sync = offloading(num_layers=2, model_layers=LAYERS)
    for _ in range(2):
        assert torch.equal(gradient_of(x, forward(layers, x, context, sync)), expected)
        with torch.no_grad():
            forward(layers, x, context, lambda out: out)
        assert context.offload_synchronizer.get_offloaded_total_size_mb() == 0


def test_a_forward_without_backward_between_two_steps(
    offloading: Offloading, make_tensor: MakeTensor, layers: list[nn.Module]
) -> None:
    x = make_tensor().requires_grad_()
    expected = plain_gradient(layers, x)
    context, sync = offloading(num_layers=2, model_layers=LAYERS)
    for _ in range(2):
        forward(layers, x, context, sync)
        assert torch.equal(gradient_of(x, forward(layers, x, context, sync)), expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers(
    offloading: Offloading, make_tensor: MakeTensor, layers: list[nn.Module], reentrant: bool
) -> None:
    x = make_tensor().requires_grad_()
    expected = plain_gradient(layers, x)
    context, sync = offloading(num_layers=2, model_layers=LAYERS)

    def recomputed(layer: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: checkpoint(layer, x, use_reentrant=reentrant)

    for _ in range(2):
        out = forward([recomputed(layer) for layer in layers], x, context, sync)
        assert torch.equal(gradient_of(x, out), expected)


def test_a_context_for_each_of_two_models(
    offloading: Offloading, make_tensor: MakeTensor, layers: list[nn.Module]
) -> None:
    """Layer by layer in turns; each has its own layers in flight."""
    xs = [make_tensor().requires_grad_() for _ in range(2)]
    expected = [plain_gradient(layers, x) for x in xs]
    made = [offloading(num_layers=2, model_layers=LAYERS) for _ in xs]
    outs = list(xs)
    for layer in layers:
        for i, (context, sync) in enumerate(made):
            with context:
                outs[i] = layer(outs[i])
            outs[i] = sync(outs[i])
    for i in range(2):
        assert torch.equal(gradient_of(xs[i], outs[i]), expected[i])

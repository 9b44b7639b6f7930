"""get_cpu_offload_context: its arguments, and how the context and its sync function are used."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.cpu_offload.conftest import MakeTensor, Memory
from tests.cpu_offload.layers import SHAPE, make_layer
from tiered_mem.cpu_offload import get_cpu_offload_context, is_cpu_offload_enabled

pytestmark = pytest.mark.usefixtures("no_gc")

Offloading = Callable[..., Any]


@pytest.mark.parametrize(
    "options",
    [{}, {"num_layers": 9, "model_layers": 2}, {"offload_activations": False}, {"offload_stream": object()}],
    ids=["plain", "too_many_layers", "nothing", "stream"],
)
def test_switched_off_it_does_nothing_and_checks_nothing(options: dict[str, Any]) -> None:
    x = torch.randn(3)
    context, sync = get_cpu_offload_context(**options)
    assert isinstance(context, contextlib.nullcontext)
    assert sync(x) is x
    context, sync, controller = get_cpu_offload_context(enabled=False, manual_synchronization=True, **options)
    assert isinstance(context, contextlib.nullcontext)
    assert sync(x) is x
    assert controller is None
    with context:
        assert not is_cpu_offload_enabled()


def test_it_must_be_told_to_offload_something(offloading: Offloading) -> None:
    with pytest.raises(ValueError, match=r"(?i)weights|activations"):
        offloading(offload_activations=False, model_layers=4)


@pytest.mark.parametrize("manual", [True, False])
def test_weights_are_not_offloaded_any_more(offloading: Offloading, manual: bool) -> None:
    options = {"model_layers": 4, "offload_weights": True, "manual_synchronization": manual}
    with pytest.warns(DeprecationWarning, match="offload_weights"):
        context, sync, *rest = offloading(**options, offload_activations=False)
    assert isinstance(context, contextlib.nullcontext)
    assert sync(3) == 3
    assert rest == ([None] if manual else [])
    with pytest.warns(DeprecationWarning, match="offload_weights"):
        context, *_ = offloading(**options)
    assert not isinstance(context, contextlib.nullcontext)


@pytest.mark.parametrize("num_layers", [4, 5])
def test_the_last_layer_cannot_be_offloaded(offloading: Offloading, num_layers: int) -> None:
    with pytest.raises(ValueError, match=f"num_layers={num_layers}.*model_layers=4"):
        offloading(num_layers=num_layers, model_layers=4)
    context, _, _ = offloading(num_layers=num_layers, model_layers=4, manual_synchronization=True)
    assert not isinstance(context, contextlib.nullcontext)


def test_all_layers_but_the_last_leave_no_time_to_overlap(offloading: Offloading) -> None:
    with pytest.warns(UserWarning, match="num_layers=3"):
        offloading(num_layers=3, model_layers=4)
    offloading(num_layers=2, model_layers=4)  # without a warning, which would be an error here


def test_a_stream_is_for_manual_synchronization(offloading: Offloading, device_module: Any) -> None:
    with pytest.raises(ValueError, match="offload_stream"):
        offloading(num_layers=1, model_layers=4, offload_stream=device_module.Stream())
    offloading(model_layers=4, manual_synchronization=True, offload_stream=device_module.Stream())


def test_double_buffering_is_accepted(offloading: Offloading) -> None:
    offloading(num_layers=1, model_layers=4, double_buffering=True)


def test_it_is_entered_once_at_a_time(offloading: Offloading) -> None:
    context, _ = offloading(num_layers=1, model_layers=4)
    with context, pytest.raises(RuntimeError):  # noqa: SIM117
        with context:
            pass


def test_sync_comes_after_the_context(offloading: Offloading, make_tensor: MakeTensor) -> None:
    context, sync = offloading(num_layers=1, model_layers=4)
    y = make_tensor().requires_grad_() * 2
    with pytest.raises(RuntimeError):
        sync(y)
    with context:
        pass
    assert sync(y) is y


def test_a_tensor_of_no_graph_passes_through_sync(offloading: Offloading, make_tensor: MakeTensor) -> None:
    """In evaluation the layers are run as they are in training."""
    context, sync = offloading(num_layers=1, model_layers=4)
    x = make_tensor()
    for _ in range(9):
        with torch.no_grad():
            with context:
                y = x * 2
            assert sync(y) is y
    with context:
        y = x * 2
    assert sync(y) is y


def test_whether_it_is_enabled_is_known_inside_only(offloading: Offloading) -> None:
    outer, _ = offloading(num_layers=1, model_layers=4)
    inner, _ = offloading(num_layers=1, model_layers=4)
    assert not is_cpu_offload_enabled()
    for _ in range(3):  # in layers that are not offloaded, too
        with outer:
            assert is_cpu_offload_enabled()
            with inner:
                assert is_cpu_offload_enabled()
            assert is_cpu_offload_enabled()
        assert not is_cpu_offload_enabled()
    with pytest.raises(KeyboardInterrupt), outer:
        raise KeyboardInterrupt
    assert not is_cpu_offload_enabled()


def test_it_decorates_a_function(offloading: Offloading, make_tensor: MakeTensor) -> None:
    context, _ = offloading(num_layers=1, model_layers=4)

    @context
    def forward() -> bool:
        return is_cpu_offload_enabled()

    assert forward()
    assert not is_cpu_offload_enabled()


def test_an_exception_in_a_layer_leaves_nothing(
    device: str, offloading: Offloading, make_tensor: MakeTensor, memory: Memory
) -> None:
    layers = [make_layer("linear", device) for _ in range(4)]
    layers[2].register_forward_pre_hook(fail)
    x = make_tensor()
    start = memory.used()
    context, sync = offloading(num_layers=2, model_layers=4)

    def forward(x: torch.Tensor, context: Any, sync: Any) -> None:
        for layer in layers:
            with context:
                x = layer(x)
            x = sync(x)

    with pytest.raises(KeyboardInterrupt):
        forward(x, context, sync)
    assert not is_cpu_offload_enabled()
    del context, sync
    assert memory.used() == start


def fail(module: torch.nn.Module, inputs: object) -> None:
    raise KeyboardInterrupt


def test_the_context_tells_how_much_is_offloaded(
    device: str, offloading: Offloading, make_tensor: MakeTensor
) -> None:
    context, sync = offloading(num_layers=1, model_layers=3)
    assert context.offload_synchronizer.get_offloaded_total_size_mb() == 0
    layer = make_layer("linear", device)
    out = make_tensor(shape=SHAPE)
    for _ in range(3):
        with context:
            out = layer(out)
        out = sync(out)
    assert context.offload_synchronizer.get_offloaded_total_size_mb() == 0.5
    out.sum().backward()
    assert context.offload_synchronizer.get_offloaded_total_size_mb() == 0

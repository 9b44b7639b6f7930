"""Layers that are computed again in backward: the numbers stay the same, and what they need stays little."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from tests.activations.recomputing import HOWS, LAYERS, STEPS, Of, gradients, plain, same, saved_bytes, tiering
from tests.models import Layer, stack
from tiered_mem import PolicyError, TieringManager
from tiered_mem.activations.operators import is_dear
from tiered_mem.policies import Event, LayerBegin, LayerOrderPolicy, Policy, Recompute


@pytest.mark.parametrize("offload", [0, 2, LAYERS])
@pytest.mark.parametrize("how", HOWS)
def test_gradients_are_those_of_the_plain_step(how: Any, offload: int, device: str) -> None:
    model, x = stack(LAYERS, device)
    right = plain(model, x)
    with tiering(device, LayerOrderPolicy(offload, recompute=how)) as manager:
        for _ in range(STEPS):
            assert same(gradients(model, x, lambda: manager.offload_context(model.layers, min_bytes=1)), right)


@pytest.mark.parametrize("how", HOWS)
def test_what_is_kept_is_little(how: Any, device: str, no_gc: None) -> None:
    """The inputs, and the results of the two products but the last one's, which nothing is made of."""
    model, x = stack(LAYERS, device)
    x.requires_grad_()
    kept = LAYERS * x.nbytes * {"full": 1, "cheap": 1 + 4}[how]
    with tiering(device) as manager:
        context = manager.offload_context(model.layers, min_bytes=x.nbytes, recompute=how)
        for _ in range(LAYERS):
            assert saved_bytes(manager, model, x, context) > kept
        assert saved_bytes(manager, model, x, context) == kept


def test_the_device_has_less_to_hold(device: str, device_module: Any) -> None:
    model, x = stack(LAYERS, device)

    def peak(recompute: Any) -> int:
        with tiering(device) as manager:
            context = manager.offload_context(model.layers, min_bytes=1, recompute=recompute)
            for _ in range(STEPS):
                device_module.reset_peak_memory_stats()
                before = device_module.memory_allocated()
                gradients(model, x, lambda: context)
            return int(device_module.max_memory_allocated() - before)

    keep, cheap, full = peak(None), peak("cheap"), peak("full")
    assert full < cheap < keep
    assert full < keep / 2


@pytest.mark.parametrize("how", HOWS)
def test_dropout_draws_the_same_again(how: Any, device: str) -> None:
    model = Of(lambda: nn.Sequential(Layer(64), nn.Dropout(0.3), nn.Linear(64, 64), nn.Dropout(0.3))).to(device)
    x = torch.randn(8, 64).to(device)
    right = plain(model, x)
    with tiering(device) as manager:
        context = manager.offload_context(model.layers, min_bytes=1, recompute=how)
        for _ in range(STEPS):
            assert same(gradients(model, x, lambda: context), right)


class Attention(nn.Module):
    """Its attention drops, and so draws random numbers before the last dropout does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.inner(x).view(8, 4, 16, 3, 64).unbind(3)
        drawn = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
        return x + functional.dropout(drawn.reshape(x.shape), 0.5).sin()


def test_an_operator_that_draws_is_computed_again(device: str) -> None:
    """Or what follows would draw the numbers that it has drawn the first time."""
    model = Of(Attention).to(device)
    x = torch.randn(8, 64, 64).to(device)
    right = plain(model, x)
    with tiering(device) as manager:
        context = manager.offload_context(model.layers, min_bytes=1, recompute="cheap")
        for _ in range(STEPS):
            assert same(gradients(model, x, lambda: context), right)


@pytest.mark.parametrize("how", HOWS)
def test_autocast_is_that_of_the_forward(how: Any, device: str) -> None:
    model, x = stack(LAYERS, device)
    with torch.autocast(device, torch.bfloat16):
        right = plain(model, x)
    with tiering(device) as manager:
        context = manager.offload_context(model.layers, min_bytes=1, recompute=how)
        for _ in range(STEPS):
            model.zero_grad()
            y = x.detach().requires_grad_()
            with torch.autocast(device, torch.bfloat16), context:
                loss = model(y)
            loss.backward()
            assert same([y.grad, *(weight.grad for weight in model.parameters())], right)


class Named(nn.Module):
    """Is called with a named tensor, a pair of them, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Layer(64)

    def forward(self, x: torch.Tensor, pair: Any, *, scale: torch.Tensor, power: int) -> torch.Tensor:
        return self.inner(x * scale) * pair[0].cos() + pair[1] ** power


@pytest.mark.parametrize("how", HOWS)
def test_inputs_of_any_form(how: Any, device: str) -> None:
    class Model(Of):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x, (x + 1, x.sin()), scale=x.tanh(), power=2)
            return x.pow(2).mean()

    model = Model(Named).to(device)
    x = torch.randn(8, 64).to(device)
    right = plain(model, x)
    with tiering(device, LayerOrderPolicy(recompute=how)) as manager:
        for _ in range(STEPS):
            assert same(gradients(model, x, lambda: manager.offload_context(model.layers, min_bytes=1)), right)


@pytest.mark.parametrize("how", HOWS)
def test_attached(how: Any, device: str) -> None:
    model, x = stack(LAYERS, device)
    right = plain(model, x)
    with tiering(device, LayerOrderPolicy(2)) as manager, manager.attach(model, min_bytes=1, recompute=how):
        for _ in range(STEPS):
            assert same(gradients(model, x, torch.enable_grad), right)


def test_a_policy_chooses_for_each_layer(device: str) -> None:
    class Chooses(Policy):
        def decide(self, event: Event) -> Sequence[Any]:
            if isinstance(event, LayerBegin) and not event.backward and event.layer in (1, 2):
                return [Recompute(event.layer, "full")]
            return []

    model, x = stack(LAYERS, device)
    right = plain(model, x)
    x.requires_grad_()
    with tiering(device) as manager:
        all_bytes = saved_bytes(manager, model, x, manager.offload_context(model.layers, min_bytes=x.nbytes))
    with tiering(device, Chooses()) as manager:
        context = manager.offload_context(model.layers, min_bytes=x.nbytes)
        for _ in range(2):
            saved_bytes(manager, model, x, context)
        assert saved_bytes(manager, model, x, context) == (all_bytes + 4 * x.nbytes) / 2
        assert same(gradients(model, x, lambda: context), right)


@pytest.mark.parametrize("layer", [0, 2, 9])
def test_advice_for_another_layer_is_passed_over(layer: int, device: str) -> None:
    class Advises(Policy):
        def decide(self, event: Event) -> Sequence[Any]:
            return [Recompute(layer, "full")] if isinstance(event, LayerBegin) and event.layer == 1 else []

    model, x = stack(LAYERS, device)
    with tiering(device, Advises()) as manager:
        context = manager.offload_context(model.layers, min_bytes=1)
        assert saved_bytes(manager, model, x, context) == saved_bytes(manager, model, x, context)
        assert manager._contexts._recomputer._kinds == {}


@pytest.mark.parametrize("answer", [Recompute(0, "twice"), Recompute("first", "full")])  # type: ignore[arg-type]
def test_what_is_no_way_to_compute_again_is_refused(answer: Recompute, device: str) -> None:
    class Answers(Policy):
        def decide(self, event: Event) -> Sequence[Any]:
            return [answer] if isinstance(event, LayerBegin) else []

    model, x = stack(1, device)
    with tiering(device, Answers()) as manager:
        context = manager.offload_context(model.layers)
        with pytest.raises(PolicyError, match=r'how is "cheap" or "full"|position of a layer'), context:
            model(x)


@pytest.mark.parametrize("how", HOWS)
def test_graphs_in_flight_together(how: Any, device: str) -> None:
    model, x = stack(LAYERS, device)
    right = plain(model, x)
    with tiering(device, LayerOrderPolicy(2, recompute=how)) as manager:
        context = manager.offload_context(model.layers, min_bytes=1)
        for order in (reversed, sorted):
            inputs = [x.detach().requires_grad_() for _ in range(3)]
            losses = []
            for each in inputs:
                with context:
                    losses.append(model(each))
            for number in order(range(3)):
                model.zero_grad()
                losses[number].backward()
                found = [inputs[number].grad, *(weight.grad for weight in model.parameters())]
                assert same(found, right)
            del losses


@pytest.mark.parametrize("how", HOWS)
def test_a_graph_that_is_used_twice(how: Any, device: str) -> None:
    model, x = stack(LAYERS, device)
    right = plain(model, x)
    with tiering(device, LayerOrderPolicy(2, recompute=how)) as manager:
        context = manager.offload_context(model.layers, min_bytes=1)
        for _ in range(STEPS):
            y = x.detach().requires_grad_()
            with context:
                loss = model(y)
            for last in (False, True):
                model.zero_grad()
                y.grad = None
                loss.backward(retain_graph=not last)
                assert same([y.grad, *(weight.grad for weight in model.parameters())], right)
            del loss


def test_a_layer_within_a_layer_goes_with_the_outer_one(device: str) -> None:
    model = Of(lambda: nn.Sequential(Layer(64), Layer(64)), 2).to(device)
    x = torch.randn(8, 64).to(device)
    right = plain(model, x)
    layers = [each for outer in model.layers for each in (outer, *outer)]
    with tiering(device) as manager:
        context = manager.offload_context(layers, min_bytes=1, recompute="full")
        for _ in range(STEPS):
            assert same(gradients(model, x, lambda: context), right)


def test_without_gradients_nothing_is_treated(device: str) -> None:
    model, x = stack(LAYERS, device)
    with tiering(device) as manager, manager.attach(model, recompute="full"):
        with torch.no_grad():
            model(x)
        assert manager._contexts._recomputer._kinds == {}


def test_an_exception_in_the_forward_leaves_nothing(device: str) -> None:
    class Fails(Layer):
        fail = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            if self.fail:
                raise KeyboardInterrupt
            return y

    model = Of(lambda: Layer(64)).to(device)
    model.layers[2] = Fails(64).to(device)
    x = torch.randn(8, 64).to(device)
    with tiering(device, LayerOrderPolicy(2, recompute="cheap")) as manager:
        for number in range(STEPS):
            Fails.fail = number in (0, 2, 5)
            if Fails.fail:
                with pytest.raises(KeyboardInterrupt):
                    gradients(model, x, lambda: manager.offload_context(model.layers, min_bytes=1))
            else:
                found = gradients(model, x, lambda: manager.offload_context(model.layers, min_bytes=1))
                assert same(found, plain(model, x))


def test_a_manager_that_computes_nothing_again(device: str) -> None:
    model, x = stack(LAYERS, device)
    with tiering(device, LayerOrderPolicy(0, recompute="full"), recompute=False) as manager:
        with pytest.raises(ValueError, match="recompute=False"):
            manager.offload_context(model.layers, recompute="cheap")
        context = manager.offload_context(model.layers, min_bytes=1)
        alive = {saved_bytes(manager, model, x, context) for _ in range(STEPS)}
        assert len(alive) == 1


@pytest.mark.parametrize("wrong", [True, "always", 1, None])
def test_arguments_are_checked(wrong: Any, device: str) -> None:
    with pytest.raises(ValueError, match='recompute is "auto", "allow" or False'):
        TieringManager(device=device, recompute=wrong)
    if wrong is not None:
        with pytest.raises(ValueError, match="recompute is"):
            LayerOrderPolicy(recompute=wrong)
        with tiering(device) as manager, pytest.raises(ValueError, match="recompute is"):
            manager.offload_context([nn.Linear(2, 2)], recompute=wrong)


@pytest.mark.parametrize("how", HOWS)
def test_a_graph_that_is_kept_holds_nothing_that_was_computed_again(
    how: Any, device: str, device_module: Any, no_gc: None
) -> None:
    model, x = stack(LAYERS, device)
    x.requires_grad_()
    with tiering(device) as manager:
        context = manager.offload_context(model.layers, min_bytes=1, recompute=how)
        for _ in range(STEPS):
            saved_bytes(manager, model, x, context)
        model.zero_grad()
        x.grad = None
        with context:
            loss = model(x)
        before = device_module.memory_allocated()
        loss.backward(retain_graph=True)
        model.zero_grad()
        x.grad = None
        assert device_module.memory_allocated() <= before
        del loss


def test_what_was_kept_is_given_each_time() -> None:
    class Products(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += is_dear(func)
            return func(*args, **(kwargs or {}))

    model, x = stack(1, "cpu")
    x.requires_grad_()
    with tiering("cpu") as manager:
        context = manager.offload_context(model.layers, min_bytes=1, recompute="cheap")
        saved_bytes(manager, model, x, context)
        with context:
            loss = model(x)
        counts = []
        for _ in range(3):
            with Products() as products:
                loss.backward(retain_graph=True)
            counts.append(products.count)
        del loss
    assert counts == [4] * 3  # two for each product's gradients, and none for the products


@pytest.mark.parametrize("how", HOWS)
def test_a_backward_inside_of_the_context(how: Any) -> None:
    """On the cpu it runs on the thread that the context is for: what is computed again is no new layer."""
    model, x = stack(LAYERS, "cpu")
    right = plain(model, x)
    with tiering("cpu", LayerOrderPolicy(2)) as manager:
        context = manager.offload_context(model.layers, min_bytes=1, recompute=how)
        for _ in range(STEPS):
            model.zero_grad()
            y = x.detach().requires_grad_()
            with context as entered:
                model(y).backward()
                calls = entered._entered
                assert calls is not None
                assert calls._calls.forward.layers == LAYERS
            assert same([y.grad, *(weight.grad for weight in model.parameters())], right)

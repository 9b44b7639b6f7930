"""Graphs that are not one forward and its backward: several in flight, used twice, on other threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import MakeManager
from tests.models import Layer, backward, equal, gradients_of, is_empty, small_stack

pytestmark = pytest.mark.usefixtures("no_gc")


@pytest.mark.parametrize("num_layers", [0, 2, None])
@pytest.mark.parametrize(
    "order", ["F0 F1 B0 F2 B2 B1", "F0 F1 F2 B1 B2 B0", "F0 F1 B1 F2 B0 B2", "F0 F1 F2 F3 B0 B1 B2 B3"]
)
def test_graphs_in_flight_in_any_order(
    device: str, make_manager: MakeManager, order: str, num_layers: int | None
) -> None:
    model, x = small_stack(3, device)
    inputs = [(x.detach() * number).requires_grad_() for number in range(1, 5)]
    expected = [backward(model(y), model, y) for y in inputs]
    offload = make_manager(num_layers).offload_context(model.layers, min_bytes=1)
    losses = {}
    for kind, number in order.split():
        if kind == "F":
            with offload:
                losses[number] = model(inputs[int(number)])
        else:
            y = inputs[int(number)]
            assert equal(backward(losses.pop(number), model, y), expected[int(number)])


class UNet(nn.Module):
    """Each layer on the way down is used again on the way up, and the first one's output at the very end too."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(Layer(16) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(32, 16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skipped = []
        for layer in self.down:
            x = layer(x)
            skipped.append(x)
        for layer, skip in zip(self.up, reversed(skipped), strict=True):
            x = layer(torch.cat([x, skip], dim=1)).tanh()
        return (x * skipped[0].sigmoid()).sum()


@pytest.mark.parametrize("num_layers", [1, 3, None])
def test_skip_connections(device: str, make_manager: MakeManager, num_layers: int | None) -> None:
    torch.manual_seed(0)
    model = UNet().to(device)
    x = torch.randn(32, 16).to(device).requires_grad_()
    expected = backward(model(x), model, x)
    offload = make_manager(num_layers).offload_context([*model.down, *model.up], min_bytes=1)
    for _ in range(2):
        with offload:
            loss = model(x)
        assert equal(backward(loss, model, x), expected)
        del loss


@pytest.mark.parametrize("per_layer", [False, True])
def test_second_outputs_that_are_used_at_the_end(device: str, make_manager: MakeManager, per_layer: bool) -> None:
    """Their gradients come first: backward begins with every layer at once, as it were."""

    class TwoHeaded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer(16)
            self.router = nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.layer(x), self.router(x).softmax(dim=-1).square()

    torch.manual_seed(0)
    layers = nn.ModuleList(TwoHeaded() for _ in range(4)).to(device)
    x = torch.randn(32, 16).to(device).requires_grad_()
    manager = make_manager(3)
    context: Any = manager.layer_context(4, min_bytes=1) if per_layer else None

    def forward() -> torch.Tensor:
        y, balance = x, []
        for layer in layers:
            if context is not None:
                with context:
                    y, auxiliary = layer(y)
                y = context.sync(y)
            else:
                y, auxiliary = layer(y)
            balance.append(auxiliary.sum())
        return y.pow(2).mean() + sum(balance)

    def plain() -> torch.Tensor:
        y, balance = x, []
        for layer in layers:
            y, auxiliary = layer(y)
            balance.append(auxiliary.sum())
        return y.pow(2).mean() + sum(balance)

    expected = backward(plain(), layers, x)
    offload = manager.offload_context(layers, min_bytes=1)
    for _ in range(2):
        if per_layer:
            loss = forward()
        else:
            with offload:
                loss = forward()
        assert equal(backward(loss, layers, x), expected)
        del loss


@pytest.mark.parametrize("num_layers", [1, None])
def test_a_graph_used_three_times(device: str, make_manager: MakeManager, num_layers: int | None) -> None:
    model, x = small_stack(3, device)
    expected = backward(model(x), model, x)
    with make_manager(num_layers).offload_context(model.layers, min_bytes=1):
        loss = model(x)
    for retain in (True, True, False):
        loss.backward(retain_graph=retain)
        assert equal(gradients_of(model, x), expected)


@pytest.mark.parametrize("inside", [False, True])
def test_a_gradient_penalty(device: str, make_manager: MakeManager, inside: bool) -> None:
    """The gradient of a gradient, which saves tensors of its own, outside of the context or in it."""
    model, x = small_stack(3, device)

    def penalty(loss: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.pow(2).sum()

    expected = backward(penalty(model(x)), model, x)
    offload = make_manager(2).offload_context(model.layers, min_bytes=1)
    for _ in range(2):
        if inside:
            with offload:
                loss = penalty(model(x))
        else:
            with offload:
                loss = model(x)
            loss = penalty(loss)
        assert equal(backward(loss, model, x), expected)
        del loss


def test_backward_inside_the_context(device: str, make_manager: MakeManager) -> None:
    model, x = small_stack(3, device)
    expected = backward(model(x), model, x)
    manager = make_manager()
    offload = manager.offload_context(model.layers, min_bytes=1)
    for _ in range(2):
        with offload:
            for _ in range(2):
                assert equal(backward(model(x), model, x), expected)
    assert is_empty(manager)


def test_two_managers_on_two_models_in_turn(device: str, make_manager: MakeManager) -> None:
    """A generator and a discriminator: the one's output is the other's input, with two managers."""
    first, x = small_stack(2, device)
    second, _ = small_stack(2, device)
    managers = make_manager(1), make_manager()
    contexts = [
        manager.offload_context(model.layers, min_bytes=1)
        for manager, model in zip(managers, (first, second), strict=True)
    ]

    def body(model: nn.Module, y: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            y = layer(y)
        return y

    expected = backward(body(second, body(first, x)).pow(2).mean(), first, second, x)
    for _ in range(2):
        with contexts[0]:
            y = body(first, x)
        with contexts[1]:
            z = body(second, y)
        with contexts[0]:
            unrelated = first(x)
        assert equal(backward(z.pow(2).mean(), first, second, x), expected)
        unrelated.backward()
        gradients_of(first, x)
        del y, z, unrelated


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Starts `work` on a thread of its own. What is returned waits for its result."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def wait() -> Any:
        thread.join()
        if isinstance(results[0], BaseException):
            raise results[0]
        return results[0]

    return wait


def test_backward_from_another_thread(device: str, device_module: Any, make_manager: MakeManager) -> None:
    model, x = small_stack(3, device)
    expected = backward(model(x), model, x)
    offload = make_manager(2).offload_context(model.layers, min_bytes=1)
    for _ in range(2):
        with offload:
            loss = model(x)
        assert equal(in_thread(lambda loss=loss: backward(loss, model, x))(), expected)
        del loss


@pytest.mark.parametrize("managers", [1, 2])
def test_two_threads_train_two_models(device: str, make_manager: MakeManager, managers: int) -> None:
    """Each on a stream of its own would be the sharper test of order; here the bookkeeping is what two share."""
    made = [make_manager() for _ in range(managers)]
    waits = []
    for number in range(2):
        model, x = small_stack(2, device)
        expected = backward(model(x), model, x)
        offload = made[number % managers].offload_context(model.layers, min_bytes=1)

        def train(
            model: nn.Module = model, x: torch.Tensor = x, expected: Any = expected, offload: Any = offload
        ) -> bool:
            right = True
            for _ in range(4):
                with offload:
                    loss = model(x)
                right &= equal(backward(loss, model, x), expected)
                del loss
            return right

        waits.append(in_thread(train))
    assert all(wait() for wait in waits)

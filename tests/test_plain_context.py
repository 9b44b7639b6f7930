"""Models whose layers come in any order, any number of times, or inside each other, in one offload context."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import MakeManager
from tests.models import Layer, backward, equal, is_empty, small_stack
from tiered_mem import OffloadContext, TieringManager

pytestmark = pytest.mark.usefixtures("no_gc")

Forward = Callable[[], torch.Tensor]


def assert_same(forward: Forward, offload: OffloadContext, *owners: nn.Module | torch.Tensor) -> None:
    """Three steps in the context give the gradients of a step without it."""
    expected = backward(forward(), *owners)
    for _ in range(3):
        with offload:
            loss = forward()
        assert equal(backward(loss, *owners), expected)
        del loss


def in_order(model: nn.Module, x: torch.Tensor, order: list[int]) -> Forward:
    """A forward that calls the model's layers by their numbers."""

    def forward() -> torch.Tensor:
        y = x
        for number in order:
            y = model.layers[number](y)
        return y.pow(2).mean()

    return forward


@pytest.mark.parametrize("num_layers", [0, 2, None])
@pytest.mark.parametrize(
    "order",
    [[3, 1, 0, 2], [0, 0, 0, 1], [0, 1, 0, 1, 2, 3, 3, 0], [1, 3], [2], []],
    ids=["permuted", "shared", "more calls than layers", "skipped", "one", "none"],
)
def test_layers_called_in_any_order(
    device: str, make_manager: MakeManager, order: list[int], num_layers: int | None
) -> None:
    model, x = small_stack(4, device)
    offload = make_manager(num_layers).offload_context(model.layers, min_bytes=1)
    assert_same(in_order(model, x, order), offload, model, x)


def test_another_set_of_layers_each_forward(device: str, make_manager: MakeManager) -> None:
    model, x = small_stack(4, device)
    orders = ([0, 1, 2, 3], [2, 1], [3, 3, 3, 3, 3, 3], [], [0], [1, 0, 3, 2])
    forwards = [in_order(model, x, order) for order in orders]
    expected = [backward(forward(), model, x) for forward in forwards]
    offload = make_manager(2).offload_context(model.layers, min_bytes=1)
    for number in (0, 1, 2, 3, 4, 5, 2, 1, 0):
        with offload:
            loss = forwards[number]()
        assert equal(backward(loss, model, x), expected[number])
        del loss


class Wide(nn.Module):
    """A layer that costs and saves `factor` times as much as another."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16 * factor)
        self.down = nn.Linear(16 * factor, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh())


@pytest.mark.parametrize("num_layers", [2, None])
def test_layers_of_any_size(device: str, make_manager: MakeManager, num_layers: int | None) -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList([Wide(8), nn.Identity(), Wide(1), nn.Linear(16, 16), Wide(32)]).to(device)
    x = torch.randn(32, 16).to(device).requires_grad_()

    def forward() -> torch.Tensor:
        y = x
        for layer in layers:
            y = layer(y)
        return y.pow(2).mean()

    assert_same(forward, make_manager(num_layers).offload_context(layers, min_bytes=1), layers, x)


def test_the_number_of_calls_is_learned(device: str, make_manager: MakeManager) -> None:
    """One layer, called three times: from the second forward on the policy knows that three layers run."""
    model, x = small_stack(1, device)
    manager = make_manager(1)
    offload = manager.offload_context(model.layers, min_bytes=1)
    away: list[object] = []

    def look(module: nn.Module, inputs: object) -> None:
        away.append(manager.stats()["host.blocks.current"])

    model.layers[0].up.register_forward_pre_hook(look)
    for step in range(3):
        away.clear()
        with offload:
            loss = in_order(model, x, [0, 0, 0])()
        first, second, third = away
        resident = int(manager.stats()["device.blocks.current"])
        loss.backward()
        del loss
        assert first == 0
        if step == 0:
            assert second > 0, "one layer of one: it is released as soon as the next one begins"
        else:
            assert (second, third > 0) == (0, True), "one layer of three: it is released when the last one begins"
            assert resident > 0
    assert manager.stats()["reloads_on_demand.total"] == 0


class Outer(nn.Module):
    """A layer with another one inside, before and after which it saves tensors of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.inner((x * self.scale).tanh()) * self.scale).sigmoid()


@pytest.mark.parametrize("num_layers", [1, 3, None])
def test_layers_inside_layers(device: str, make_manager: MakeManager, num_layers: int | None) -> None:
    torch.manual_seed(0)
    innermost = Layer(16)
    middle = Outer(innermost)
    outer = Outer(nn.Sequential(middle, nn.GELU(), innermost)).to(device)
    x = torch.randn(32, 16).to(device).requires_grad_()
    manager = make_manager(num_layers)
    offload = manager.offload_context([outer, middle, innermost], min_bytes=1)
    assert_same(lambda: outer(outer(x)).sum(), offload, outer, x)
    assert int(manager.stats()["offloaded.blocks.total"]) > 0


def test_what_an_outer_layer_saves_after_an_inner_one_moves_too(device: str, make_manager: MakeManager) -> None:
    x = torch.randn(32, 16).to(device).requires_grad_()
    inner = nn.Identity()
    outer = Outer(inner).to(device)
    manager = make_manager()
    with manager.offload_context([outer, inner], min_bytes=x.nbytes):
        loss = outer(x).sum()
    # x * scale saves x; tanh and sigmoid save their outputs; tanh's is saved by the second product again.
    assert manager.stats()["offloaded.bytes.total"] == 3 * x.nbytes
    loss.backward()


def test_a_layer_that_never_began_ends_no_other(device: str, make_manager: MakeManager) -> None:
    x = torch.randn(32, 16).to(device).requires_grad_()
    inner = nn.Identity()

    def refuse(module: nn.Module, inputs: object) -> None:
        raise ValueError

    class Catching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with contextlib.suppress(ValueError):
                inner(x)
            return (x * 2).tanh()

    inner.register_forward_pre_hook(refuse)
    outer = Catching()
    manager = make_manager()
    with manager.offload_context([outer, inner], min_bytes=x.nbytes):
        loss = outer(x).sum()
    assert manager.stats()["offloaded.bytes.total"] == x.nbytes
    loss.backward()


def test_a_layer_whose_failure_the_model_catches(device: str, make_manager: MakeManager) -> None:
    """The layer before goes on, and what comes after is the layers' own again."""

    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.tanh().exp()
            raise ValueError

    class Fallback(nn.Module):
        def __init__(self, first: nn.Module, second: nn.Module) -> None:
            super().__init__()
            self.first, self.second = first, second

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.tanh()
            try:
                return self.first(x)
            except ValueError:
                return self.second(x.exp())

    model, x = small_stack(3, device)
    failing = Failing()
    fallback = Fallback(failing, model.layers[1])

    def forward() -> torch.Tensor:
        return model.layers[2](fallback(model.layers[0](x))).pow(2).mean()

    expected = backward(forward(), model, x)
    manager = make_manager()
    offload = manager.offload_context([*model.layers, failing, fallback], min_bytes=1)
    for _ in range(3):
        with offload:
            loss = forward()
        assert manager.stats()["device.blocks.current"] == 0, "a layer whose end was not seen keeps its tensors"
        assert equal(backward(loss, model, x), expected)
        del loss
    assert manager.stats()["reloads_on_demand.total"] == 0


def test_two_lists_with_layers_in_common(device: str, make_manager: MakeManager) -> None:
    model, x = small_stack(4, device)
    expected = backward(model(x), model, x)
    manager = make_manager()
    first = manager.offload_context(model.layers[:3], min_bytes=1)
    second = manager.offload_context(model.layers[1:], min_bytes=1)
    for _ in range(2):
        with first, second:
            together = model(x)
        with second:
            after = model(x)
        assert equal(backward(after, model, x), expected)
        assert equal(backward(together, model, x), expected)
        del together, after
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.layers)


def test_a_list_that_names_a_layer_twice(device: str, make_manager: MakeManager) -> None:
    model, x = small_stack(2, device)
    manager = make_manager()
    offload = manager.offload_context([model.layers[0], model.layers[1], model.layers[0]], min_bytes=1)
    assert_same(in_order(model, x, [0, 1, 0]), offload, model, x)
    assert manager.stats()["reloads_on_demand.total"] == 0


def test_layers_from_a_generator(device: str, make_manager: MakeManager) -> None:
    model, x = small_stack(3, device)
    manager = make_manager()
    offload = manager.offload_context((layer for layer in model.layers), min_bytes=1)
    assert_same(lambda: model(x), offload, model, x)
    assert int(manager.stats()["offloaded.blocks.total"]) > 0


class Language(nn.Module):
    """The model's layers are its longest list; inside a layer is a list of its own."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + sum(expert(x).tanh() for expert in self.experts)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        self.body = nn.ModuleDict({"blocks": nn.ModuleList(self.Block() for _ in range(3))})
        self.heads = nn.ModuleList([nn.Linear(16, 4), nn.Linear(16, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.body["blocks"]:
            x = block(x)
        return sum(head(x).pow(2).mean() for head in self.heads)


def test_the_repeated_blocks_of_a_model_are_found(device: str, make_manager: MakeManager) -> None:
    torch.manual_seed(0)
    model = Language().to(device)
    x = torch.randn(32, 16).to(device).requires_grad_()
    by_hand, found = make_manager(), make_manager()
    for manager, layers in ((by_hand, model.body["blocks"]), (found, model)):
        assert_same(lambda: model(x), manager.offload_context(layers, min_bytes=1), model, x)
    moved = int(found.stats()["offloaded.bytes.total"])
    assert moved == by_hand.stats()["offloaded.bytes.total"] > 0


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_sequential_of_layers(device: str, make_manager: MakeManager, wrapped: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(16) for _ in range(3))).to(device)
    x = torch.randn(32, 16).to(device).requires_grad_()
    manager = make_manager()
    offload = manager.offload_context(nn.ModuleDict({"body": model}) if wrapped else model, min_bytes=1)
    assert_same(lambda: model(x).sum(), offload, model, x)
    assert manager.stats()["host.used.peak"] != 0
    assert manager.stats()["reloads_on_demand.total"] == 0


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(4, 4),
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),
        nn.Sequential(nn.ReLU(), nn.ReLU()),
        nn.ModuleDict({"one": nn.ModuleList([nn.Linear(4, 4)])}),
    ],
    ids=["layer", "different layers", "without weights", "one alone"],
)
def test_a_model_without_repeated_blocks_is_told_how_to_name_them(
    make_manager: MakeManager, model: nn.Module
) -> None:
    advice = rf"layers of {type(model).__name__} are unknown: .* Name them, as in offload_context\(model.layers\)"
    with pytest.raises(ValueError, match=advice):
        make_manager().offload_context(model)


class Sharded(nn.Module):
    """As a sharding wrapper does it: the layer's weights are there for its forward and for its backward only."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.shards = [parameter.detach().cpu() for parameter in layer.parameters()]
        self.free()

    def gather(self, *_: object) -> None:
        for parameter, shard in zip(self.layer.parameters(), self.shards, strict=True):
            parameter.untyped_storage().resize_(shard.nbytes)
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(parameter):
                parameter.copy_(shard)

    def free(self) -> None:
        for parameter in self.layer.parameters():
            parameter.untyped_storage().resize_(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.gather()
        y = self.layer(x)
        self.free()
        y.register_hook(self.gather)
        return y


@pytest.mark.parametrize("named", ["wrappers", "layers"])
def test_layers_whose_weights_come_and_go(device: str, make_manager: MakeManager, named: str) -> None:
    model, x = small_stack(3, device)
    expected = backward(model(x), model, x)
    layers = list(model.layers)
    model.layers = nn.ModuleList(Sharded(layer) for layer in layers)
    manager = make_manager()
    offload = manager.offload_context(model.layers if named == "wrappers" else layers, min_bytes=1)
    for _ in range(2):
        with offload:
            loss = model(x)
        assert equal(backward(loss, model, x), expected)
        del loss
    assert manager.stats()["reloads_on_demand.total"] == 0


def test_a_context_as_a_decorator(device: str, make_manager: MakeManager) -> None:
    model, x = small_stack(3, device)
    expected = backward(model(x), model, x)
    manager = make_manager()

    @manager.offload_context(model.layers, min_bytes=1)
    def forward(scale: float) -> torch.Tensor:
        """Forward."""
        return model(x) * scale

    for _ in range(2):
        assert equal(backward(forward(scale=1.0), model, x), expected)
    assert forward.__doc__ == "Forward."
    assert int(manager.stats()["offloaded.blocks.total"]) > 0


def test_a_context_that_was_entered_twice_goes_on(device: str, make_manager: MakeManager) -> None:
    """The second enter is refused, and the forward it was meant to interrupt is as if it had not been."""
    model, x = small_stack(2, device)
    expected = backward(model(x), model, x)
    manager = make_manager()
    offload = manager.offload_context(model.layers, min_bytes=1)
    for _ in range(2):
        with offload:
            with pytest.raises(RuntimeError, match="entered already; make a second one"):
                offload.__enter__()
            loss = model(x)
        assert equal(backward(loss, model, x), expected)
        del loss
    assert manager.stats()["reloads_on_demand.total"] == 0
    assert is_empty(manager)


def test_a_forward_inside_a_context_of_another_one(device: str, make_manager: MakeManager) -> None:
    """The inner context's layers are the inner one's while it lasts, and the outer one goes on afterwards."""
    torch.manual_seed(0)
    layers = [Layer(16).to(device) for _ in range(3)]
    owner = nn.ModuleList(layers)
    x = torch.randn(32, 16).to(device).requires_grad_()

    def forward(*contexts: Any) -> torch.Tensor:
        y = layers[0](x)
        for context in contexts:
            context.__enter__()
        y = layers[1](y)
        for context in reversed(contexts):
            context.__exit__(None, None, None)
        return layers[2](y).pow(2).mean()

    expected = backward(forward(), owner, x)
    for same_manager in (True, False):
        manager = make_manager()
        other: TieringManager = manager if same_manager else make_manager()
        outer = manager.offload_context(layers, min_bytes=1)
        inner = other.offload_context([layers[1]], min_bytes=1)
        for _ in range(2):
            with outer:
                loss = forward(inner)
            moved = [int(m.stats()["offloaded.bytes.total"]) for m in (manager, other)]
            assert equal(backward(loss, owner, x), expected)
            del loss
        if not same_manager:
            assert moved[0] == 2 * moved[1], "the inner manager has one layer of the three"

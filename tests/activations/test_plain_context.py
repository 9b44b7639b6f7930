"""Models whose layers come in any order and any number of times, of any size, in one offload context."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.conftest import MakeManager
from tests.models import assert_same, backward, equal, in_order, small_stack

pytestmark = pytest.mark.usefixtures("no_gc")


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

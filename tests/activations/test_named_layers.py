"""How layers are named: in lists with repeats or in common, by a generator, or by the model alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.conftest import MakeManager
from tests.models import Layer, assert_same, backward, equal, in_order, small_stack

pytestmark = pytest.mark.usefixtures("no_gc")


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
    moved = [int(manager.stats()["offloaded.bytes.total"]) for manager in (by_hand, found)]
    assert moved[1] == moved[0] + 3 * 2 * x.nbytes  # of the stem, in each of three rounds


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
        nn.ModuleDict({"one": nn.Linear(4, 4), "another": nn.Linear(4, 4)}),
        nn.Sequential(nn.ReLU(), nn.ReLU()),
        nn.ModuleDict({"one": nn.ModuleList([nn.Linear(4, 4)])}),
    ],
    ids=["layer", "layers in no order", "without weights", "one alone"],
)
def test_a_model_without_repeated_blocks_is_told_how_to_name_them(
    make_manager: MakeManager, model: nn.Module
) -> None:
    advice = rf"layers of {type(model).__name__} are unknown: .* Name them, as in offload_context\(model.layers\)"
    with pytest.raises(ValueError, match=advice):
        make_manager().offload_context(model)

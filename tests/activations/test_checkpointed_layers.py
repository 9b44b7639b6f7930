"""Layers under torch.utils.checkpoint, which throws away what they save and computes it again."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.conftest import MakeManager
from tests.models import assert_same, backward, equal, small_stack

pytestmark = pytest.mark.usefixtures("no_gc")


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_layers_move_their_inputs(
    device: str, make_manager: MakeManager, use_reentrant: bool, inside: bool
) -> None:
    """That is all there is to move: the rest is computed again. Backward may run inside the context, too."""
    model, x = small_stack(3, device)

    def forward() -> torch.Tensor:
        y = x
        for layer in model.layers:
            y = checkpoint(layer, y, use_reentrant=use_reentrant)
        return y.sum()

    expected = backward(forward(), model, x)
    manager = make_manager()
    offload = manager.offload_context(model.layers, min_bytes=1)
    for step in range(1, 4):
        with offload:
            loss = forward()
            moved = int(manager.stats()["offloaded.bytes.total"])
            if inside:
                assert equal(backward(loss, model, x), expected)
        if not inside:
            # The first layer's input is the leaf x, the others' are what the layer before gave.
            assert int(manager.stats()["offloaded.bytes.total"]) == step * 3 * x.nbytes
            assert manager.stats()["host.bytes.current"] == 3 * x.nbytes
            assert equal(backward(loss, model, x), expected)
        assert moved > 0
        del loss
    if not inside:
        assert manager.stats()["reloads_on_demand.total"] == 0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_some_layers_checkpointed(device: str, make_manager: MakeManager, use_reentrant: bool) -> None:
    model, x = small_stack(4, device)

    def forward() -> torch.Tensor:
        y = x
        for number, layer in enumerate(model.layers):
            y = checkpoint(layer, y, use_reentrant=use_reentrant) if number % 2 else layer(y)
        return y.sum()

    manager = make_manager(3)
    offload = manager.offload_context(model.layers, min_bytes=1)
    assert_same(forward, offload, model, x)
    assert manager.stats()["reloads_on_demand.total"] == 0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_context_inside_a_checkpointed_function(
    device: str, make_manager: MakeManager, use_reentrant: bool
) -> None:
    """What is saved there is thrown away and computed again in backward, in the context once more."""
    model, x = small_stack(3, device)
    manager = make_manager()
    offload = manager.offload_context(model.layers, min_bytes=1)

    def body(y: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            y = layer(y)
        return y

    def offloaded(y: torch.Tensor) -> torch.Tensor:
        with offload:
            return body(y)

    expected = backward(checkpoint(body, x, use_reentrant=use_reentrant).pow(2).mean(), model, x)
    for _ in range(2):
        loss = checkpoint(offloaded, x, use_reentrant=use_reentrant).pow(2).mean()
        assert equal(backward(loss, model, x), expected)
        del loss
    assert int(manager.stats()["offloaded.blocks.total"]) > 0

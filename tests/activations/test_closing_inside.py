"""A manager that is closed while a forward runs: it ends, and its backward has what it needs or says why not."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from tests.models import backward, equal, small_stack
from tiered_mem import TieringManager
from tiered_mem.activations.hooks import saving_hook
from tiered_mem.errors import Closed


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("policy", ["layer-order", "lru"])
def test_a_manager_that_is_closed_inside_a_forward(policy: str, attached: bool, device: str) -> None:
    model, x = small_stack(4, device)
    expected = backward(model(x), model, x)
    manager = TieringManager(policy=policy, device=device, host_bytes="8MiB")
    context = nullcontext() if attached else manager.offload_context(model.layers, min_bytes=1)
    if attached:
        manager.attach(model, min_bytes=1)
    model.layers[2].register_forward_hook(lambda *_: manager.close())
    with context:
        loss = model(x)
    assert saving_hook() is None
    with pytest.raises(Closed, match="closed before this backward"):
        loss.backward()
    model.zero_grad()
    x.grad = None
    assert equal(backward(model(x), model, x), expected)


def test_what_is_saved_after_the_end_stays(device: str) -> None:
    """So the backward of a forward that had saved nothing before is right."""
    layers = [nn.Tanh(), nn.Sigmoid()]
    x = torch.randn(64, 64).to(device).requires_grad_()
    manager = TieringManager(policy="layer-order", device=device, host_bytes="8MiB")
    with manager.offload_context(layers, min_bytes=1):
        manager.close()
        y = layers[1](layers[0](x)).sum()
    expected = torch.autograd.grad(x.tanh().sigmoid().sum(), x)
    assert torch.equal(*expected, *torch.autograd.grad(y, x))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_manager_is_not_copied(copied: object, manager: TieringManager) -> None:
    assert callable(copied)
    with pytest.raises(TypeError, match="a TieringManager can be neither copied nor pickled: it owns host memory"):
        copied(manager)

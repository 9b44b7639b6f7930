"""Attached models are exported, traced, scripted, copied and transformed as if nobody had attached them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, jvp, vmap

from tests.conftest import MakeManager
from tests.models import Stack, gradients_of, small_stack, stack
from tiered_mem import TieringManager
from tiered_mem.policies import LayerOrderPolicy

Export = Callable[[nn.Module, torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]


def export(model: nn.Module, x: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return torch.export.export(model, (x,)).module()


def trace(model: nn.Module, x: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return torch.jit.trace(model, x)


def script(model: nn.Module, x: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return torch.jit.script(model)


def moved(manager: TieringManager) -> int:
    return int(manager.stats()["offloaded.bytes.total"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit is deprecated
@pytest.mark.parametrize("state", ["attached", "closed", "removed"])
@pytest.mark.parametrize("of", [export, trace, script])
@pytest.mark.parametrize("training", [True, False])
def test_it_can_be_exported(training: bool, of: Export, state: str) -> None:
    model, x = small_stack(2, "cpu")
    model.train(training)
    x = x.detach()
    expected = model(x)
    with TieringManager(policy=LayerOrderPolicy(), device="cpu", pin=False, host_bytes="8MiB") as manager:
        attachment = manager.attach(model, min_bytes=1)
        if state == "closed":
            manager.close()
        elif state == "removed":
            attachment.remove()
        assert torch.equal(of(model, x)(x), expected)
        assert manager.stats()["offloaded.bytes.total"] == 0


@pytest.mark.parametrize("of", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_moves_nothing_and_has_no_hooks(
    of: Callable[[Stack], Stack], device: str, make_manager: MakeManager
) -> None:
    model, x = stack(2, device)
    manager = make_manager()
    with manager.attach(model, min_bytes=1024):
        twin = of(model).to(device)  # torch_npu before 2.13 unpickles to the CPU
        for module in twin.modules():
            assert not module._forward_hooks
            assert not module._forward_pre_hooks
            assert "__reduce_ex__" not in vars(module)
        twin(x).backward()
        assert moved(manager) == 0
        model(x).backward()
        assert moved(manager) > 0
    assert all(map(torch.equal, gradients_of(twin), gradients_of(model)))


def by_grad(model: Stack, x: torch.Tensor) -> object:
    return grad(lambda weights: functional_call(model, weights, (x,)))(dict(model.named_parameters()))


def by_vmap(model: Stack, x: torch.Tensor) -> object:
    return vmap(model)(torch.stack([x, 2 * x]))


def by_jacrev(model: Stack, x: torch.Tensor) -> object:
    return jacrev(model)(x)


def by_jvp(model: Stack, x: torch.Tensor) -> object:
    return jvp(model, (x,), (2 * x,))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch scripts what jvp needs
@pytest.mark.parametrize("transform", [by_grad, by_vmap, by_jacrev, by_jvp])
def test_transforms_run_untouched(
    transform: Callable[[Stack, torch.Tensor], object], device: str, make_manager: MakeManager
) -> None:
    model, x = small_stack(2, device)
    x = x.detach()
    expected = transform(model, x)
    manager = make_manager()
    with manager.attach(model, min_bytes=1):
        torch.testing.assert_close(transform(model, x), expected, rtol=0, atol=0)
        assert moved(manager) == 0
        model(x).backward()
        assert moved(manager) > 0


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_manager_is_not_copied(copied: Callable[[object], object], make_manager: MakeManager) -> None:
    with pytest.raises(TypeError, match=r"can be neither copied nor pickled: .* Make another one, or leave it out"):
        copied(make_manager())

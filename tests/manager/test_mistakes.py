"""What users get wrong, and the one line that tells them what to type."""

from __future__ import annotations

import importlib
import logging
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from tests.conftest import MakeManager
from tests.models import Stack, small_stack
from tiered_mem import TieringManager


def test_a_model_on_another_accelerator(device: str) -> None:
    """Which is not the cpu, from where it may yet come."""
    if device == "cpu":
        pytest.skip("takes two devices")
    model = Stack(2, 16).to(device)
    words = rf"on {device}:0, .* is on cpu: make it with TieringManager\(device='{device}:0'\), or .*to\('cpu'\)"
    with TieringManager(device="cpu", host_bytes="64MiB") as manager:
        with pytest.raises(ValueError, match=words):
            manager.attach(model)
        with pytest.raises(ValueError, match=words):
            manager.offload_context(model)
        with pytest.raises(ValueError, match=words):
            manager.register_optimizer(torch.optim.AdamW(model.parameters()))


def test_a_model_that_is_left_on_the_cpu(device: str, caplog: pytest.LogCaptureFixture) -> None:
    """It trains there, and says once that nothing moves. One that comes later is right."""
    if device == "cpu":
        pytest.skip("the manager's device is the cpu")
    model, x = small_stack(2, "cpu")
    with TieringManager(device=device, host_bytes="64MiB") as manager:
        manager.attach(model, min_bytes=1)
        optimizer = manager.register_optimizer(torch.optim.AdamW(model.parameters()))
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                model(x).backward()
                optimizer.step()
        activations, states = (record.getMessage() for record in caplog.records)
        assert "on another device than the manager's: move the model there" in activations
        assert f"AdamW are on cpu, and so are its states, none of which moves: model.to('{device}:0')" in states


class OnCpu(nn.Module):
    """A layer that somebody offloads already."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with save_on_cpu():
            y: torch.Tensor = self.layer(x)
        return y


def test_checkpointed_layers_with_small_inputs_are_no_other_offloader(
    device: str, make_manager: MakeManager, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = small_stack(2, device)
    manager = make_manager()
    with manager.offload_context(model.layers, min_bytes="1GiB"):
        for layer in model.layers:
            x = checkpoint(layer, x, use_reentrant=False)
    x.sum().backward()
    assert "hooks inside of them" not in caplog.text


@pytest.mark.filterwarnings(
    "ignore:Cannot create tensor with internal format"
)  # torch_npu's, on save_on_cpu's copy
@pytest.mark.parametrize("where", ["around", "between", "inside"])
def test_two_offloaders(
    where: str, device: str, make_manager: MakeManager, caplog: pytest.LogCaptureFixture
) -> None:
    """One is refused that can be seen before it has the tensors; of another a line tells. Afterwards ours works."""
    model, x = small_stack(2, device)
    manager = make_manager()
    context = manager.offload_context(model, min_bytes=1)
    if where == "inside":
        layers, model.layers = model.layers, nn.ModuleList(map(OnCpu, model.layers))
        offload = manager.offload_context(model, min_bytes=1)
        for _ in range(2):
            with offload:
                loss = model(x)
            loss.backward()
            del loss
        (record,) = caplog.records
        assert "nothing of what the layers saved came to tiered_mem: hooks inside of them" in record.getMessage()
        model.layers = layers
    else:
        words = r"save_on_cpu\(\) and tiered_mem's attach\(\) or offload_context\(\) would both move the same"
        outer, inner = (save_on_cpu(), nullcontext()) if where == "around" else (nullcontext(), save_on_cpu())
        with pytest.raises(ValueError, match=words), outer, context, inner:
            model(x)
    with context:
        loss = model(x)
    loss.backward()
    del loss
    assert int(manager.stats()["offloaded.blocks.total"]) > 0


class EndToEnd(torch.optim.SGD):
    """As those of torch_npu.optim and apex are for Ascend."""

    is_npu_fused_optimizer = True


@pytest.mark.parametrize("whose", ["torch_npu", "apex"])
def test_a_fused_npu_optimizer(whose: str, device: str) -> None:
    """Its gradients must not be set to None, and its states are parts of one tensor."""
    make: Any = EndToEnd
    if whose == "torch_npu":
        if device != "npu":
            pytest.skip("it is torch_npu's")
        make = importlib.import_module("torch_npu.optim").NpuFusedAdamW
    model, _ = small_stack(2, device)
    words = r"end to end, .*: use one of torch's instead, such as torch\.optim\.AdamW\(\.\.\., fused=True\)"
    with TieringManager(device=device, host_bytes="64MiB") as manager, pytest.raises(ValueError, match=words):
        manager.register_optimizer(make(model.parameters()))


class KeepsGradients(torch.optim.SGD):
    """Its gradients stay where they are."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none)


def test_an_optimizer_empties_its_gradients_itself(device: str, make_manager: MakeManager) -> None:
    model, x = small_stack(2, device)
    optimizer = make_manager().register_optimizer(KeepsGradients(model.parameters(), lr=0.1))
    model(x).backward()
    weight = next(model.parameters())
    gradient = weight.grad
    optimizer.zero_grad()
    assert gradient is not None
    assert weight.grad is gradient
    assert not gradient.any()
    optimizer.zero_grad(set_to_none=True)
    assert weight.grad is None


def test_an_optimizer_whose_parameters_are_gone(device: str, caplog: pytest.LogCaptureFixture) -> None:
    """fully_shard puts others in their place, and torch 2.13 leaves a mark on those."""
    model, x = small_stack(2, device)
    gone = [nn.Parameter(weight.detach().clone()) for weight in model.parameters()]
    with TieringManager(device=device, host_bytes="64MiB") as manager:
        optimizer = manager.register_optimizer(torch.optim.AdamW(gone))
        for _ in range(2):
            model(x).backward()
            optimizer.step()
        (record,) = caplog.records
        assert "no parameter of AdamW has a gradient, and its step changes nothing" in record.getMessage()
        for weight in gone:
            weight._fsdp_orig_uid = 1  # type: ignore[attr-defined]
        words = (
            r"8 of 8 parameters of AdamW .* `fully_shard\(model\); optimizer = manager\.register_optimizer\(AdamW"
        )
        with pytest.raises(ValueError, match=words.replace("8", str(len(gone)))):
            optimizer.step()
        with pytest.raises(ValueError, match="are not the model's any more"):
            manager.register_optimizer(torch.optim.AdamW(gone))

"""What stays on the device is counted by reason, and a context in which it is the most says so once."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tests.models import Stack, stack
from tiered_mem import TieringManager
from tiered_mem.cpu_offload import mark_not_offload
from tiered_mem.ground.stats import REASONS
from tiered_mem.policies import LayerOrderPolicy, LRUPolicy, ManualPolicy, Policy


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.WARNING, "tiered_mem.activations"):
        yield caplog


def make(policy: Policy, device: str, host_bytes: str = "64MiB") -> TieringManager:
    return TieringManager(policy=policy, device=device, host_bytes=host_bytes)


def step(manager: TieringManager, model: Stack, x: torch.Tensor, times: int = 3, **options: object) -> None:
    context = manager.offload_context(model.layers, **options)  # type: ignore[arg-type]
    for _ in range(times):
        with context:
            loss = model(x)
        loss.backward()


def stayed(manager: TieringManager) -> dict[str, int]:
    """The bytes by reason, of the reasons that there were."""
    stats = manager.stats()
    sizes = {reason: int(stats[f"stayed.{reason}.bytes.total"]) for reason in REASONS}
    counts = {reason: int(stats[f"stayed.{reason}.tensors.total"]) for reason in REASONS}
    assert {reason for reason, count in counts.items() if count} == {
        reason for reason, size in sizes.items() if size
    }
    return {reason: size for reason, size in sizes.items() if size}


def test_what_the_policy_left_is_told_once(device: str, said: pytest.LogCaptureFixture) -> None:
    model, x = stack(4, device)
    with make(LRUPolicy(), device) as manager:  # its budget is never reached
        step(manager, model, x, min_bytes=1024)
        assert set(stayed(manager)) == {"policy", "outside"}
    assert len(said.records) == 1
    assert "nothing moves" in said.text
    assert "left there by the policy" in said.text


def test_small_tensors_are_named(device: str, said: pytest.LogCaptureFixture) -> None:
    model, x = stack(4, device)
    with make(LayerOrderPolicy(), device) as manager:
        step(manager, model, x, min_bytes="64MiB")
        assert set(stayed(manager)) == {"small"}
        # Of the weights, which are saved as well, none is counted.
        saved = 3 * 4 * x.nbytes * (1 + 1 + 4 + 4)
        assert saved < stayed(manager)["small"] < 1.2 * saved
    assert [record.message.count("below min_bytes") for record in said.records] == [1]


def test_what_lies_outside_of_the_layers_is_named(device: str, said: pytest.LogCaptureFixture) -> None:
    model, x = stack(4, device)
    model.layers = nn.ModuleList(model.layers)
    with make(LayerOrderPolicy(), device) as manager:
        context = manager.offload_context(model.layers[3:], min_bytes=1024)
        for _ in range(3):
            with context:
                loss = model(x)
            loss.backward()
        sizes = stayed(manager)
        assert sizes["outside"] > 3 * 3 * x.nbytes * 10
    assert len(said.records) == 1
    assert "outside the layers of the context" in said.text


def test_an_input_that_moves_after_all_does_not_count(device: str) -> None:
    """What a checkpoint saves around a layer is the layer's, which shows when the layer begins."""
    model, x = stack(2, device)

    def forward() -> torch.Tensor:
        y = x.sin()
        for layer in model.layers:
            y = torch.utils.checkpoint.checkpoint(layer, y, use_reentrant=False)
        return y.sum()

    with make(LayerOrderPolicy(), device) as manager:
        with manager.offload_context(model.layers, min_bytes=1024):
            loss = forward()
        assert manager.stats()["offloaded.blocks.total"] == 2
        assert "outside" not in stayed(manager)
        del loss


def test_other_devices_marks_and_kinds_are_named(device: str, said: pytest.LogCaptureFixture) -> None:
    x = torch.randn(64, 64, device=device, requires_grad=True)
    beside = torch.randn(64, 64, requires_grad=True)
    phases = torch.complex(torch.randn(64, 64), torch.randn(64, 64)).requires_grad_()

    class Layer(nn.Module):
        def forward(self, y: torch.Tensor) -> torch.Tensor:
            marked = y * 2
            mark_not_offload(marked)
            (beside * beside).sum()
            return marked.sin()

    with make(LayerOrderPolicy(), device) as manager:
        layers = nn.ModuleList([Layer()])
        with manager.offload_context(layers, min_bytes=1):
            y = layers[0](x)
        assert stayed(manager)["marked"] == x.nbytes
        if device != "cpu":
            assert stayed(manager)["other_device"] == 2 * beside.nbytes
            assert "on another device" in said.text
        del y
    with make(LayerOrderPolicy(), "cpu") as manager:
        with manager.offload_context(layers, min_bytes=1):
            kept = phases.conj() * phases.conj()
        assert stayed(manager)["kind"] == 2 * phases.nbytes
        del kept


def test_a_full_host_tier_is_named(device: str, said: pytest.LogCaptureFixture) -> None:
    model, x = stack(4, device)
    with make(LayerOrderPolicy(), device, host_bytes="4MiB") as manager:
        step(manager, model, x, min_bytes=1024)
        assert stayed(manager)["no_room"] > 0
    (told,) = [message for message in said.messages if "saved for backward" in message]
    assert "raise host_bytes" in told


@pytest.mark.parametrize("policy", [LayerOrderPolicy(), ManualPolicy()])
def test_nothing_is_said_where_most_moves_or_the_user_moves_it(
    policy: Policy, device: str, said: pytest.LogCaptureFixture
) -> None:
    model, x = stack(4, device)
    with make(policy, device) as manager:
        step(manager, model, x, min_bytes=1024)
        with torch.no_grad():
            step(manager, model, x, times=0)
    assert said.text == ""


def test_a_forward_that_an_exception_ends_says_nothing(device: str, said: pytest.LogCaptureFixture) -> None:
    model, x = stack(4, device)
    with make(LayerOrderPolicy(), device) as manager:
        context = manager.offload_context(model.layers, min_bytes="64MiB")

        def broken_off() -> None:
            with context:
                model.layers[0](x)
                raise KeyError

        with pytest.raises(KeyError):
            broken_off()
        assert said.text == ""
        step(manager, model, x, min_bytes="64MiB")
        assert "below min_bytes" in said.text


def test_the_summary_tells(device: str) -> None:
    model, x = stack(4, device)
    with make(LRUPolicy(), device) as manager:
        step(manager, model, x, min_bytes=1024)
        assert " policy" in next(row for row in manager.memory_summary().splitlines() if "saved and stayed" in row)

"""An optimizer and its model leave the device for a phase, and come back."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

from tests.optimizer.conftest import MakeTiered
from tests.optimizer.training import differences, outcome
from tiered_mem.errors import Offloaded, TierFull


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        model(torch.full((64, 32), 0.1 * step, device=next(model.parameters()).device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def make_model(device: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(32, 32, device=device) for _ in range(6)))


@pytest.mark.parametrize("residency", ["host", "disk", "device-until-offload"])
def test_nothing_of_them_is_on_the_device_meanwhile(residency: str, device: str, make_tiered: MakeTiered) -> None:
    module = torch.get_device_module(device)
    results = []
    for tier in (False, True):
        before = module.memory_allocated()
        model = make_model(device)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
        if tier:
            optimizer = make_tiered(optimizer, residency=residency, bucket_bytes="16KiB")
        for _ in range(3):
            train(model, optimizer, 3)
            if tier:
                manager = make_tiered.manager
                manager.offload(model)
                manager.offload(optimizer)
                manager.offload(optimizer)
                assert module.memory_allocated() <= before
                with pytest.raises(Offloaded):
                    train(model, optimizer, 1)
                noise = torch.full((1 << 16,), 7.0, device=device)
                del noise
                manager.reload(optimizer)
                manager.reload(model)
        results.append(outcome(optimizer, list(model.parameters())))
        del model, optimizer
    assert not differences(*results)


def test_a_step_while_the_states_are_away(device: str, make_tiered: MakeTiered) -> None:
    """They pass through, and rest on the host until they are brought back."""
    module = torch.get_device_module(device)
    results = []
    for tier in (False, True):
        model = make_model(device)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
        if tier:
            optimizer = make_tiered(optimizer, residency="device-until-offload", bucket_bytes="16KiB")
            make_tiered.manager.offload(optimizer)
            held = module.memory_allocated()
        train(model, optimizer, 4)
        if tier:
            assert module.memory_allocated() == held
            make_tiered.manager.reload(optimizer)
            assert module.memory_allocated() > held
        train(model, optimizer, 2)
        results.append(outcome(optimizer, list(model.parameters())))
    assert not differences(*results)


def test_no_room_to_come_back(device: str, make_tiered: MakeTiered) -> None:
    """All stays away, and can be brought back later."""
    module = torch.get_device_module(device)
    params = [torch.nn.Parameter(torch.ones(1024, 1024, device=device)) for _ in range(3)]
    tiered = make_tiered(torch.optim.AdamW(params), residency="device-until-offload", bucket_bytes="16MiB")
    for param in params:
        param.grad = torch.ones_like(param)
    tiered.step()
    expected = outcome(tiered, params)
    make_tiered.manager.offload(tiered)
    module.empty_cache()
    held = module.memory_allocated()
    module.set_per_process_memory_fraction(1e-4)
    rest = []
    try:
        with suppress(torch.OutOfMemoryError):  # torch's pool may have pieces left from before
            while True:
                rest.append(torch.empty(1 << 20, dtype=torch.uint8, device=device))
        with pytest.raises(torch.OutOfMemoryError):
            make_tiered.manager.reload(tiered)
    finally:
        module.set_per_process_memory_fraction(1.0)
        rest.clear()
    assert module.memory_allocated() == held
    make_tiered.manager.reload(tiered)
    assert not differences(expected, outcome(tiered, params))


def test_the_host_memory_is_taken_at_registration(device: str, make_tiered: MakeTiered) -> None:
    """So that an offload cannot fail for want of it."""
    params = [torch.nn.Parameter(torch.ones(1024, 1024, device=device)) for _ in range(3)]
    with pytest.raises(TierFull, match="optimizer states"):
        make_tiered(torch.optim.AdamW(params), residency="device-until-offload", host_bytes="8MiB")


def test_what_is_neither_module_nor_tiered_optimizer(device: str, make_tiered: MakeTiered) -> None:
    optimizer = torch.optim.AdamW(make_model(device).parameters())
    make_tiered(optimizer)
    for call in (make_tiered.manager.offload, make_tiered.manager.reload):
        with pytest.raises(TypeError, match="or what register_optimizer returned, not AdamW"):
            call(optimizer)

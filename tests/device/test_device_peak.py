"""torch's peak of device memory begins anew while a step is recorded, and is true for who reads it afterwards."""

from __future__ import annotations

import random
from types import ModuleType

import pytest
import torch

from tests.models import stack
from tiered_mem import TieringManager
from tiered_mem.device.device import Device, DevicePeak

MIB = 1 << 20


def hold(device: str, nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def test_what_comes_and_goes_is_seen_only_where_the_peak_begins_anew(
    device: str, device_module: ModuleType
) -> None:
    peak = DevicePeak(Device(device))
    hold(device, 64 * MIB)
    before, *_ = peak.read()
    hold(device, 16 * MIB)
    assert peak.read()[1] == before, "below the highest that ever was"
    peak.begin_anew()
    hold(device, 16 * MIB)
    assert 16 * MIB <= peak.read()[1] - before < 17 * MIB
    peak.restore()


def test_what_came_before_the_peak_began_anew_is_told_once(device: str, device_module: ModuleType) -> None:
    """Else it would count for the next step as well."""
    peak = DevicePeak(Device(device))
    peak.begin_anew()
    hold(device, 16 * MIB)
    peak.begin_anew()
    peak.restore()
    allocated, most, _, before = peak.read()
    assert (most, before >= allocated + 16 * MIB) == (allocated, True)
    assert peak.read()[3] == 0


def test_a_peak_that_the_user_began_anew_is_seen(device: str, device_module: ModuleType) -> None:
    peak = DevicePeak(Device(device))
    hold(device, 64 * MIB)
    before, *_ = peak.read()
    device_module.reset_peak_memory_stats()
    hold(device, 16 * MIB)
    assert peak.read()[1] - before >= 16 * MIB


def test_a_part_is_measured_without_a_difference_for_others(device: str, device_module: ModuleType) -> None:
    peak = DevicePeak(Device(device))
    hold(device, 64 * MIB)
    peak.read()
    true = device_module.max_memory_allocated()
    with peak.measured() as most:
        hold(device, 16 * MIB)
    assert 16 * MIB <= most() - device_module.memory_allocated() < 17 * MIB
    assert true - MIB < device_module.max_memory_allocated() <= true


@pytest.mark.parametrize("seed", range(8))
def test_the_peak_is_restored_without_new_memory(device: str, device_module: ModuleType, seed: int) -> None:
    chance = random.Random(seed)
    peak = DevicePeak(Device(device))
    device_module.reset_peak_memory_stats()
    held: list[torch.Tensor] = []
    true = device_module.memory_allocated()
    for _ in range(100):
        if chance.random() < 0.6:
            held.append(hold(device, int(2 ** chance.uniform(5, 24))))
        elif held:
            held.pop(chance.randrange(len(held)))
        true = max(true, device_module.memory_allocated())
        if chance.random() < 0.1:
            peak.read()
            peak.begin_anew()
    del held[::2]
    reserved = device_module.memory_reserved()
    peak.restore()
    assert device_module.max_memory_allocated() == true
    assert device_module.memory_reserved() == reserved


def test_the_peak_is_restored_out_of_the_piece_that_fits(device: str, device_module: ModuleType) -> None:
    """Of 2, 4 and 8 MiB that are free, 4 of 5.25 would leave a rest that 2 do not give to the byte."""
    device_module.empty_cache()
    held = [hold(device, nbytes) for piece in (2, 4, 8) for nbytes in (piece * MIB, 3 * MIB // 2)]
    del held[::2]
    peak = DevicePeak(Device(device))
    device_module.reset_peak_memory_stats()
    hold(device, 21 * MIB // 4)
    true = device_module.max_memory_allocated()
    peak.begin_anew()
    peak.restore()
    assert device_module.max_memory_allocated() == true


def test_torch_tells_the_truth_after_the_backward_of_a_recorded_step(
    device: str, device_module: ModuleType
) -> None:
    """Between its forward and backward 24 MiB are taken for a moment, and in the second step not."""
    model, x = stack(3, device)
    with (
        TieringManager(device_budget="256MiB", device=device, host_bytes="16MiB") as manager,
        manager.attach(model, min_bytes=1024),
    ):
        model(x).backward()  # CUDA's libraries take memory for their first product
        device_module.reset_peak_memory_stats()
        before = device_module.memory_allocated()
        loss = model(x)
        hold(device, 24 * MIB)
        loss.backward()
        assert device_module.max_memory_allocated() - before >= 24 * MIB
        device_module.reset_peak_memory_stats()
        model(x).backward()
        assert device_module.max_memory_allocated() - before < 24 * MIB

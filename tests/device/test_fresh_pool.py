"""torch's pool gives back what it has cached before a step that may not fit it, and before no other."""

from __future__ import annotations

import gc
from types import ModuleType

import pytest
import torch

from tiered_mem.device.device import Device
from tiered_mem.device.fresh_pool import FreshPool

MIB = 1 << 20


def take(device: str, nbytes: int) -> None:
    """And leave it in the pool."""
    torch.empty(nbytes, dtype=torch.uint8, device=device)


def cached(module: ModuleType) -> int:
    return int(module.memory_reserved() - module.memory_allocated())


@pytest.fixture
def fresh(device: str, device_module: ModuleType) -> FreshPool:
    """Which has seen a step, and no cached piece."""
    gc.collect()
    device_module.synchronize()
    device_module.empty_cache()
    pool = FreshPool(Device(device))
    pool.step_begins(recorded=False)
    return pool


@pytest.mark.parametrize("recorded", [False, True], ids=["alike", "with room for another beside them"])
def test_steps_keep_their_pieces(recorded: bool, fresh: FreshPool, device: str, device_module: ModuleType) -> None:
    take(device, 64 * MIB)
    for _ in range(3):
        fresh.step_begins(recorded=recorded)
        assert cached(device_module) >= 64 * MIB


def test_after_a_step_in_which_torch_gave_pieces_back_all_go_once(
    fresh: FreshPool, device: str, device_module: ModuleType
) -> None:
    take(device, 64 * MIB)
    most = device_module.memory_reserved() + 32 * MIB
    device_module.set_per_process_memory_fraction(most / device_module.mem_get_info()[1])
    try:
        take(device, 80 * MIB)
    finally:
        device_module.set_per_process_memory_fraction(1.0)
    assert cached(device_module) >= 80 * MIB
    fresh.step_begins(recorded=False)
    assert cached(device_module) < 64 * MIB
    take(device, 80 * MIB)
    fresh.step_begins(recorded=False)
    assert cached(device_module) >= 80 * MIB

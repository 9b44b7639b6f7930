"""The memory of modules that are away: on a full host, a full device, and when module or manager end."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import MakeManager
from tests.models import same
from tests.phases.modules import MIB, SIDE, contents, mixed, parked
from tests.spilling import Spilling, Training
from tiered_mem import Offloaded, TierFull, TieringManager
from tiered_mem.policies import LayerOrderPolicy


@pytest.fixture
def no_room(device: str, device_module: Any) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Inside, the device has no memory to give but what torch has already."""
    if device == "cpu":
        pytest.skip("the cpu has no limit")

    @contextlib.contextmanager
    def full() -> Iterator[None]:
        device_module.synchronize()
        device_module.empty_cache()
        device_module.set_per_process_memory_fraction(1e-4)
        try:
            yield
        finally:
            device_module.set_per_process_memory_fraction(1.0)

    return full


# Host memory.


def test_the_second_cycle_takes_the_same_host_memory(manager: TieringManager, device: str) -> None:
    model = mixed(device)
    x = torch.ones(2, SIDE, device=device)
    model(x).sum().backward()
    manager.offload(model, gradients=True)
    first = manager.stats()
    for _ in range(3):
        manager.reload(model)
        assert manager.stats()["host.used.current"] == first["host.used.current"]
        model.zero_grad()
        model(x).sum().backward()  # gradients in memory of their own
        manager.offload(model, gradients=True)
        now = manager.stats()
        assert all(now[name] == first[name] for name in ("host.slots", "host.used.current", "host.used.peak"))
    manager.reload(model)


def test_host_memory_is_given_back_when_the_module_dies(manager: TieringManager, device: str, no_gc: None) -> None:
    for phase in ("away", "back", "used while away"):
        layer = nn.Linear(SIDE, SIDE).to(device)
        manager.offload(layer)
        assert manager.stats()["host.slots"] == 2
        if phase == "used while away":
            with pytest.raises(Offloaded):
                layer(torch.ones(1, SIDE, device=device))
        if phase != "away":
            manager.reload(layer)
        del layer
        manager.synchronize()
        assert manager.stats()["host.slots"] == 0, phase


def test_a_full_host_tier_refuses_before_anything_moves(make_manager: MakeManager, device: str) -> None:
    manager = make_manager(1, host_bytes="16MiB")
    small, fitting, large = (nn.Linear(SIDE, n * SIDE, bias=False).to(device) for n in (1, 9, 17))
    manager.offload(small)
    with pytest.raises(TierFull, match=r"needed 17\.0 MiB, free 15\.0 MiB, used 1\.0 MiB, limit 16\.0 MiB"):
        manager.offload(large)
    several = nn.ModuleList([fitting, nn.Linear(SIDE, 7 * SIDE, bias=False).to(device)])
    with pytest.raises(TierFull, match=r"needed 16\.0 MiB.*nothing was offloaded"):
        manager.offload(several)
    assert parked(manager) == MIB
    assert manager.stats()["host.slots"] == 1
    manager.reload(small)
    manager.offload(fitting)
    manager.reload(fitting)


def test_activations_make_room_on_the_host_for_a_module(spilling: Spilling, training: Training) -> None:
    manager = spilling(LayerOrderPolicy(), 32 * MIB)
    weights = [torch.zeros(8 * MIB, dtype=torch.uint8, device=training.device) for _ in range(5)]
    resting = nn.ParameterList(nn.Parameter(weight, requires_grad=False) for weight in weights)
    weights.clear()
    loss = training.forward(manager)
    manager.synchronize()
    assert int(manager.stats()["host.used.current"]) > 8 * MIB
    with pytest.raises(TierFull):
        manager.offload(resting)
    assert manager.stats()["spilled.bytes.total"] == 0, "it can never fit, and so nothing makes room for it"
    fitting = nn.ParameterList(list(resting)[:3])
    manager.offload(fitting)
    assert int(manager.stats()["spilled.bytes.total"]) > 0
    loss.backward()
    assert training.is_right()
    manager.reload(fitting)


# When the device is full.


def test_a_full_device_leaves_all_of_it_away(
    manager: TieringManager,
    device: str,
    device_module: Any,
    no_room: Callable[[], contextlib.AbstractContextManager[None]],
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(4 * SIDE, SIDE)).to(device)
    before = contents(model)
    manager.offload(model)
    little = torch.ones(2, device=device)  # torch has more memory of that kind, enough for the first layer
    nbytes, allocated = parked(manager), device_module.memory_allocated()
    with no_room():
        with pytest.raises(torch.OutOfMemoryError) as error:
            manager.reload(model)
        assert device_module.memory_allocated() == allocated
    assert parked(manager) == nbytes
    with pytest.raises(Offloaded):
        model[0](little)
    del error
    manager.reload(model)
    assert same(contents(model), before)


# When the manager is forgotten or closed.


def test_a_forgotten_manager_lives_as_long_as_something_is_away(device: str, no_gc: None) -> None:
    layer = nn.Linear(8, 8).to(device)
    before = contents(layer)
    manager = TieringManager(policy="layer-order", device=device, host_bytes="8MiB")
    manager.offload(layer)
    reference = weakref.ref(manager)
    del manager
    forgotten = reference()
    assert forgotten is not None
    forgotten.reload(layer)
    assert same(contents(layer), before)
    del forgotten
    assert reference() is None
    assert same(contents(layer), before)


def test_close_brings_modules_back(make_manager: MakeManager, device: str) -> None:
    model = mixed(device)
    before = contents(model)
    manager = make_manager(1)
    manager.offload(model)
    manager.close()
    assert same(contents(model), before)
    manager.close()
    manager.reload(model)
    assert same(contents(model), before)
    assert manager.stats()["host.slots"] == 0


def test_what_the_device_has_no_room_for_at_close_can_be_brought_back_later(
    device: str, no_room: Callable[[], contextlib.AbstractContextManager[None]], caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(4 * SIDE, SIDE)).to(device)
    before = contents(model)
    manager = TieringManager(policy="layer-order", device=device, host_bytes="8MiB")
    manager.offload(model)
    with no_room():
        manager.close()
    assert "the device has no room for 4.0 MiB that were offloaded" in caplog.text
    with pytest.raises(Offloaded, match="its manager was closed when the device had no room for it"):
        model(torch.ones(4 * SIDE, device=device))
    manager.close()
    manager.reload(model)
    assert same(contents(model), before)

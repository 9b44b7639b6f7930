"""Copies that cannot be started, and reloads that the device has no room for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conftest import EMULATED, Link
from tests.reuse import use_free_memory
from tests.service import NBYTES, SLOW, Service, interrupt_second_copy, make_tensor, view_of_all
from tiered_mem.allocators import AclPinnedMemory, SlabPool
from tiered_mem.policies import Action, Offload, Release, Reload

pytestmark = pytest.mark.usefixtures("no_gc")


@pytest.mark.skipif(not EMULATED, reason="only the emulator's race detector can tell")
def test_nothing_is_running_after_an_offload_that_failed(
    device: str, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slots are free, and their memory goes back to the system here at once."""
    tensors = [make_tensor(device), make_tensor(device)]
    pool = SlabPool(AclPinnedMemory())
    service = Service(device, host_pool=pool)
    link(SLOW)
    blocks = [service.save(tensor) for tensor in tensors]
    interrupt_second_copy(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        service.do(*(Offload(block.key) for block in blocks))
    pool.close()
    service.manager.close()


@pytest.mark.skipif(not EMULATED, reason="only the emulator's race detector can tell")
def test_nothing_is_running_after_a_reload_that_failed(
    device: str, link: Link, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory that it was to fill is others' here at once."""
    blocks = [service.save(make_tensor(device)), service.save(make_tensor(device))]
    service.do(*(Offload(block.key) for block in blocks), *(Release(block.key) for block in blocks))
    link(SLOW)
    interrupt_second_copy(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        service.do(*(Reload(block.key) for block in blocks))
    assert use_free_memory(device) >= 2 * NBYTES


@pytest.mark.parametrize("direction", ["offload", "reload"])
def test_a_copy_that_cannot_be_started_leaves_the_block_where_it_was(
    device: str, service: Service, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor, second = make_tensor(device), make_tensor(device)
    view, expected = view_of_all(tensor), [tensor.cpu(), second.cpu()]
    blocks = [service.save(tensor), service.save(second)]
    del tensor, second
    actions: dict[str, list[Action]] = {
        "offload": [Offload(block.key) for block in blocks],
        "reload": [Reload(block.key) for block in blocks],
    }
    if direction == "reload":
        service.do(*actions["offload"], *(Release(block.key) for block in blocks))
    places = [block.place for block in blocks]
    interrupt_second_copy(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        service.do(*actions[direction])
    monkeypatch.undo()
    assert [block.place for block in blocks] == places
    assert service.manager.stats()["host.slots"] == (0 if direction == "offload" else 2)
    service.do(*actions["offload"], *(Release(block.key) for block in blocks))
    for block, contents in zip(blocks, expected, strict=True):
        assert torch.equal(service.manager._activations.load(block, view).cpu(), contents)
        service.let_go(block)


def test_an_early_reload_that_finds_the_device_full_is_put_off(
    device: str, device_module: Any, service: Service
) -> None:
    tensor = make_tensor(device)
    expected, view = tensor.cpu(), view_of_all(tensor)
    block = service.save(tensor)
    del tensor
    service.do(Offload(block.key))
    service.do(Release(block.key))
    device_module.empty_cache()
    device_module.set_per_process_memory_fraction(1e-4)
    try:
        service.do(Reload(block.key))
        with pytest.raises(torch.OutOfMemoryError):
            service.manager._activations.load(block, view)
    finally:
        device_module.set_per_process_memory_fraction(1.0)
    assert service.manager.stats()["reloads_postponed.total"] == 1
    assert torch.equal(service.manager._activations.load(block, view).cpu(), expected)
    service.let_go(block)

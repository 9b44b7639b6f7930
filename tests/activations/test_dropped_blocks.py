"""Blocks that are dropped or wanted back while they are copied, and when their memory is used again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conftest import Link
from tests.service import NBYTES, SLOW, OnCommand, Service, make_tensor, view_of_all
from tiered_mem import TieringManager
from tiered_mem.policies import Action, Event, LayerEnd, Offload, Release, Reload

pytestmark = pytest.mark.usefixtures("no_gc")


def test_a_reloaded_block_that_nobody_reads_is_safe_to_drop(device: str, service: Service, link: Link) -> None:
    tensor = make_tensor(device)
    block = service.save(tensor)
    del tensor
    service.do(Offload(block.key))
    service.do(Release(block.key))
    link(SLOW)
    service.do(Reload(block.key))
    assert block.tensor is not None
    address = block.tensor.data_ptr()
    service.let_go(block)
    other = torch.zeros(NBYTES // 4, device=device)
    assert other.data_ptr() == address, "the allocator gave other memory: nothing is shown"
    assert not other.cpu().any()


@pytest.mark.schedules("eager", "late", why="its copies run when they like")
def test_a_block_dropped_while_it_leaves_is_safe(device: str, service: Service, link: Link) -> None:
    """Its host slot is not handed out again before the copy into it has ended."""
    tensor = make_tensor(device)
    link(SLOW)
    block = service.save(tensor)
    service.do(Offload(block.key))
    slot = block.host
    assert slot is not None
    service.let_go(block)
    del block
    stats = service.manager.stats()
    assert int(stats["host.used.current"]) >= slot.lease.region.nbytes
    service.manager.synchronize()
    assert service.manager.stats()["host.used.current"] == 0


@pytest.mark.schedules("eager", "late", why="its copies run when they like")
def test_a_block_wanted_back_before_its_release_never_left(device: str, service: Service, link: Link) -> None:
    tensor = make_tensor(device)
    link(SLOW)
    view, address = view_of_all(tensor), tensor.data_ptr()
    block = service.save(tensor)
    service.do(Offload(block.key))
    service.do(Reload(block.key))
    assert service.manager._activations.load(block, view).data_ptr() == address
    assert service.manager.stats()["host.slots"] == 1, "the copy into the slot is still running"
    assert service.manager.stats()["reloaded.blocks.total"] == 0
    service.let_go(block)


def test_a_block_wanted_back_before_its_release_and_dropped_is_safe(
    device: str, device_module: Any, service: Service, link: Link
) -> None:
    """The copy that nobody needs any more still reads the device memory. Only the race detector can tell."""
    tensor = make_tensor(device)
    link(SLOW)
    block = service.save(tensor)
    del tensor
    service.do(Offload(block.key))
    service.do(Reload(block.key))
    service.let_go(block)
    del block
    torch.zeros(NBYTES // 4, device=device)
    device_module.synchronize()


def test_a_slot_whose_copy_has_ended_is_used_again(
    device: str, device_module: Any, service: Service, link: Link
) -> None:
    link(SLOW)
    for _ in range(2):
        block = service.save(make_tensor(device))
        service.do(Offload(block.key))
        service.let_go(block)
        device_module.synchronize()
    assert service.manager.stats()["host.used.peak"] == NBYTES


@pytest.mark.schedules("eager", "late", why="its copies run when they like")
def test_the_host_waits_for_room_that_is_about_to_be_free(device: str, link: Link, device_module: Any) -> None:
    """A slot on its way back counts as room: what a step keeps on the device must not depend on timing."""
    service = Service(device)
    policy = OnCommand()
    with TieringManager(policy=policy, device=device, host_bytes=NBYTES + 4096) as manager:
        service.manager, service._policy = manager, policy
        tensors = [torch.full((NBYTES // 4,), float(i)).to(device) for i in range(2)]
        device_module.synchronize()
        link(SLOW)
        first, second = (service.save(tensor) for tensor in tensors)
        service.do(Offload(first.key))
        assert first.ticket is not None
        copied = first.ticket.event
        service.let_go(first)
        assert not copied.query()
        service.do(Offload(second.key))
        assert copied.query()
        service.let_go(second)
        assert manager.stats()["host.waits.total"] == 1
        assert manager.stats()["kept.blocks.total"] == 0


def test_a_block_that_is_dropped_while_the_manager_is_at_work_is_gone_after_that(device: str) -> None:
    """Here a policy drops it. Nothing happens afterwards that would give it up as well."""

    class Dropping(OnCommand):
        def decide(self, event: Event) -> list[Action]:
            if isinstance(event, LayerEnd):
                manager._activations.dropped.append(block)
                manager._activations.free_dropped()
            return []

    with TieringManager(policy=Dropping(), device=device, host_bytes="32MiB") as manager:
        block, _ = manager._activations.save(torch.ones(1024, device=device), graph=0, layer=0)
        manager._activations.notify(LayerEnd(graph=0, layer=0))
        assert manager.stats()["device.blocks.current"] == 0

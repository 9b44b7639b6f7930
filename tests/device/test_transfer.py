"""Copies run beside compute, and whoever uses either end of one waits for it on the device, not on the host."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from tests.conftest import Link
from tests.service import NBYTES, SLOW, Service, make_tensor, view_of_all
from tiered_mem.policies import Offload, Release, Reload

pytestmark = pytest.mark.usefixtures("no_gc")


@pytest.mark.schedules("eager", "late", why="its copies run when they like")
def test_memory_falls_on_release_while_the_copy_is_running(
    device: str, device_module: Any, service: Service, link: Link
) -> None:
    size = 5 * NBYTES
    tensor = make_tensor(device, size)
    expected, view = tensor.cpu(), view_of_all(tensor)
    link("100MB/s")
    before = device_module.memory_allocated()
    began = time.perf_counter()
    block = service.save(tensor)
    del tensor
    service.do(Offload(block.key))
    service.do(Release(block.key))
    seconds = time.perf_counter() - began
    assert block.ticket is not None
    running = not block.ticket.event.query()
    after = device_module.memory_allocated()
    assert running, f"the copy had ended after {seconds:.3f} s"
    assert before - after == pytest.approx(size, rel=0.01)
    assert torch.equal(service.manager._activations.load(block, view).cpu(), expected)
    service.let_go(block)


def test_released_memory_is_not_overwritten_before_it_is_copied(device: str, service: Service, link: Link) -> None:
    tensor = make_tensor(device)
    expected, view, address = tensor.cpu(), view_of_all(tensor), tensor.data_ptr()
    link(SLOW)
    block = service.save(tensor)
    del tensor
    service.do(Offload(block.key))
    service.do(Release(block.key))
    other = torch.zeros(NBYTES // 4, device=device)
    assert other.data_ptr() == address, "the allocator gave other memory: nothing is shown"
    assert torch.equal(service.manager._activations.load(block, view).cpu(), expected)
    service.let_go(block)


def test_a_copy_waits_for_the_work_that_makes_its_source(
    device: str, device_module: Any, service: Service, link: Link
) -> None:
    a = torch.randn(1500, 1500).to(device)
    device_module.synchronize()
    made = a @ a @ a @ a
    view = view_of_all(made)
    block = service.save(made)
    service.do(Offload(block.key))
    service.do(Release(block.key))
    expected = made.cpu()
    assert torch.equal(service.manager._activations.load(block, view).cpu(), expected)
    service.let_go(block)


def test_a_reload_waits_for_its_own_offload(device: str, service: Service, link: Link) -> None:
    """Nothing but this wait orders the two directions of the link."""
    tensor = make_tensor(device)
    expected, view = tensor.cpu(), view_of_all(tensor)
    link(SLOW)
    block = service.save(tensor)
    del tensor
    service.do(Offload(block.key))
    service.do(Release(block.key))
    service.do(Reload(block.key))
    assert torch.equal(service.manager._activations.load(block, view).cpu(), expected)
    service.let_go(block)


def test_a_reload_does_not_write_into_memory_that_is_still_read(
    device: str, device_module: Any, service: Service
) -> None:
    """The destination comes from the caching allocator, which hands out memory that queued work still uses."""
    tensor = make_tensor(device)
    block = service.save(tensor)
    del tensor
    service.do(Offload(block.key))
    service.do(Release(block.key))
    device_module.synchronize()
    a = torch.randn(1500, 1500).to(device)
    victim = make_tensor(device)
    expected = victim.cpu() * 2
    for _ in range(4):
        a = a @ a
    late = victim + victim
    address = victim.data_ptr()
    del victim
    service.do(Reload(block.key))
    assert block.tensor is not None
    assert block.tensor.data_ptr() == address, "the allocator gave other memory: nothing is shown"
    assert torch.equal(late.cpu(), expected)
    service.let_go(block)


def test_a_reload_on_another_stream_waits_for_its_own_offload(
    device: str, device_module: Any, service: Service, link: Link
) -> None:
    """The stream that released the block has waited for the copy; this one has not."""
    tensor = make_tensor(device)
    expected, view = tensor.cpu(), view_of_all(tensor)
    other = device_module.Stream()
    link(d2h=SLOW)
    block = service.save(tensor)
    del tensor
    service.do(Offload(block.key))
    service.do(Release(block.key))
    with device_module.stream(other):
        service.do(Reload(block.key))
        assert torch.equal(service.manager._activations.load(block, view).cpu(), expected)
    service.let_go(block)


def test_a_host_slot_is_not_filled_again_while_it_is_read(device: str, service: Service, link: Link) -> None:
    tensor, other = make_tensor(device), torch.zeros(NBYTES // 4).to(device)
    expected, view = tensor.cpu(), view_of_all(tensor)
    block, next_block = service.save(tensor), service.save(other)
    del tensor
    service.do(Offload(block.key))
    service.do(Release(block.key))
    link(h2d=SLOW)
    service.do(Reload(block.key))
    service.do(Offload(next_block.key))
    assert torch.equal(service.manager._activations.load(block, view).cpu(), expected)
    service.let_go(block)
    service.let_go(next_block)


def test_memory_that_another_stream_reads_is_not_handed_out(
    device: str, device_module: Any, service: Service, link: Link
) -> None:
    """A block reloaded on one stream and used on another goes back to the first one's memory."""
    other = device_module.Stream()
    with device_module.stream(other):
        a = torch.randn(1500, 1500).to(device)
    tensor = make_tensor(device)
    expected, view = tensor.cpu() * 2, view_of_all(tensor)
    block = service.save(tensor)
    del tensor
    service.do(Offload(block.key))
    service.do(Release(block.key))
    service.do(Reload(block.key))
    with device_module.stream(other):
        for _ in range(4):
            a = a @ a
        loaded = service.manager._activations.load(block, view)
        late = loaded + loaded
    del loaded
    service.let_go(block)
    del block
    overwritten = [torch.zeros(NBYTES // 4, device=device) for _ in range(3)]  # in whatever memory is free now
    device_module.current_stream().synchronize()
    del overwritten
    with device_module.stream(other):
        assert torch.equal(late.cpu(), expected)


@pytest.mark.parametrize("direction", ["offload", "reload"])
def test_synchronize_waits_for_both_directions(device: str, service: Service, link: Link, direction: str) -> None:
    tensor = make_tensor(device)
    link(SLOW)
    block = service.save(tensor)
    del tensor
    service.do(Offload(block.key))
    if direction == "reload":
        service.do(Release(block.key))
        service.do(Reload(block.key))
    service.manager.synchronize()
    assert block.ticket is not None
    assert block.ticket.event.query()
    service.let_go(block)

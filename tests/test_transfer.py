"""Copies run beside compute, and whoever uses either end of one waits for it on the device, not on the host."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.conftest import EMULATED, Link
from tiered_mem import ChangedTensor, TieringManager
from tiered_mem.allocators import AclPinnedMemory, SlabPool
from tiered_mem.block import Block, view_of
from tiered_mem.policies import Action, Event, Offload, Release, Reload, Saved

NBYTES = 12 << 20  # above 10 MiB the caching allocator gives a tensor a segment of its own
SLOW = "50MB/s"  # a quarter of a second for a copy

pytestmark = pytest.mark.usefixtures("no_gc")


class OnCommand:
    """A policy that says what the test told it to say."""

    def __init__(self) -> None:
        self.next: list[Action] = []

    def check(self, num_layers: int) -> None:
        """Any number suits."""

    def decide(self, event: Event) -> list[Action]:
        actions, self.next = self.next, []
        return actions


class Service:
    """A manager, with its steps to be called one by one."""

    def __init__(self, device: str, host_pool: SlabPool | None = None) -> None:
        self._policy = OnCommand()
        host_bytes = "256MiB" if host_pool is None else None
        self.manager = TieringManager(
            policy=self._policy, device=device, host_bytes=host_bytes, host_pool=host_pool
        )

    def save(self, tensor: torch.Tensor) -> Block:
        return self.manager.activations.save(tensor, graph=0, layer=0)[0]

    def do(self, *actions: Action) -> None:
        self._policy.next = list(actions)
        self.manager.activations.notify(Saved(graph=0, layer=0, key=-1, nbytes=0))


@pytest.fixture
def service(device: str) -> Iterator[Service]:
    service = Service(device)
    yield service
    service.manager.close()


def make_tensor(device: str, nbytes: int = NBYTES) -> torch.Tensor:
    """Random numbers in memory that, once freed, is what the caching allocator hands out for this size."""
    module = getattr(torch, device)
    module.synchronize()
    module.empty_cache()
    tensor = torch.randn(nbytes // 4).to(device)
    module.synchronize()
    return tensor


def interrupt_second_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = torch._foreach_copy_

    def copy_first(to: list[torch.Tensor], of: list[torch.Tensor], non_blocking: bool) -> None:
        copy(to[:1], of[:1], non_blocking=non_blocking)
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "_foreach_copy_", copy_first)


@pytest.mark.schedules("eager", "late", why="its copies run when they like")
def test_memory_falls_on_release_while_the_copy_is_running(
    device: str, device_module: Any, service: Service, link: Link
) -> None:
    size = 5 * NBYTES
    tensor = make_tensor(device, size)
    expected, view = tensor.cpu(), view_of(tensor, (0, 0, size), 0)
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
    assert torch.equal(service.manager.activations.load(block, view).cpu(), expected)
    service.manager.activations.let_go(block)


def test_released_memory_is_not_overwritten_before_it_is_copied(device: str, service: Service, link: Link) -> None:
    tensor = make_tensor(device)
    expected, view, address = tensor.cpu(), view_of(tensor, (0, 0, NBYTES), 0), tensor.data_ptr()
    link(SLOW)
    block = service.save(tensor)
    del tensor
    service.do(Offload(block.key))
    service.do(Release(block.key))
    other = torch.zeros(NBYTES // 4, device=device)
    assert other.data_ptr() == address, "the allocator gave other memory: nothing is shown"
    assert torch.equal(service.manager.activations.load(block, view).cpu(), expected)
    service.manager.activations.let_go(block)


def test_a_copy_waits_for_the_work_that_makes_its_source(
    device: str, device_module: Any, service: Service, link: Link
) -> None:
    a = torch.randn(1500, 1500).to(device)
    device_module.synchronize()
    made = a @ a @ a @ a
    view = view_of(made, (0, 0, made.nbytes), 0)
    block = service.save(made)
    service.do(Offload(block.key))
    service.do(Release(block.key))
    expected = made.cpu()
    assert torch.equal(service.manager.activations.load(block, view).cpu(), expected)
    service.manager.activations.let_go(block)


def test_a_reload_waits_for_its_own_offload(device: str, service: Service, link: Link) -> None:
    """Nothing but this wait orders the two directions of the link."""
    tensor = make_tensor(device)
    expected, view = tensor.cpu(), view_of(tensor, (0, 0, NBYTES), 0)
    link(SLOW)
    block = service.save(tensor)
    del tensor
    service.do(Offload(block.key))
    service.do(Release(block.key))
    service.do(Reload(block.key))
    assert torch.equal(service.manager.activations.load(block, view).cpu(), expected)
    service.manager.activations.let_go(block)


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
    assert block.device is not None
    assert block.device.tensor.data_ptr() == address, "the allocator gave other memory: nothing is shown"
    assert torch.equal(late.cpu(), expected)
    service.manager.activations.let_go(block)


def test_a_reloaded_block_that_nobody_reads_is_safe_to_drop(device: str, service: Service, link: Link) -> None:
    tensor = make_tensor(device)
    block = service.save(tensor)
    del tensor
    service.do(Offload(block.key))
    service.do(Release(block.key))
    link(SLOW)
    service.do(Reload(block.key))
    assert block.device is not None
    address = block.device.tensor.data_ptr()
    service.manager.activations.let_go(block)
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
    service.manager.activations.let_go(block)
    del block
    stats = service.manager.stats()
    assert int(stats["host.used.current"]) >= slot.lease.region.nbytes
    service.manager.synchronize()
    assert service.manager.stats()["host.used.current"] == 0


def test_a_reload_on_another_stream_waits_for_its_own_offload(
    device: str, device_module: Any, service: Service, link: Link
) -> None:
    """The stream that released the block has waited for the copy; this one has not."""
    tensor = make_tensor(device)
    expected, view = tensor.cpu(), view_of(tensor, (0, 0, NBYTES), 0)
    other = device_module.Stream()
    link(d2h=SLOW)
    block = service.save(tensor)
    del tensor
    service.do(Offload(block.key))
    service.do(Release(block.key))
    with device_module.stream(other):
        service.do(Reload(block.key))
        assert torch.equal(service.manager.activations.load(block, view).cpu(), expected)
    service.manager.activations.let_go(block)


def test_a_host_slot_is_not_filled_again_while_it_is_read(device: str, service: Service, link: Link) -> None:
    tensor, other = make_tensor(device), torch.zeros(NBYTES // 4).to(device)
    expected, view = tensor.cpu(), view_of(tensor, (0, 0, NBYTES), 0)
    block, next_block = service.save(tensor), service.save(other)
    del tensor
    service.do(Offload(block.key))
    service.do(Release(block.key))
    link(h2d=SLOW)
    service.do(Reload(block.key))
    service.do(Offload(next_block.key))
    assert torch.equal(service.manager.activations.load(block, view).cpu(), expected)
    service.manager.activations.let_go(block)
    service.manager.activations.let_go(next_block)


def test_memory_that_another_stream_reads_is_not_handed_out(
    device: str, device_module: Any, service: Service, link: Link
) -> None:
    """A block reloaded on one stream and used on another goes back to the first one's memory."""
    other = device_module.Stream()
    with device_module.stream(other):
        a = torch.randn(1500, 1500).to(device)
    tensor = make_tensor(device)
    expected, view = tensor.cpu() * 2, view_of(tensor, (0, 0, NBYTES), 0)
    block = service.save(tensor)
    del tensor
    service.do(Offload(block.key))
    service.do(Release(block.key))
    service.do(Reload(block.key))
    with device_module.stream(other):
        for _ in range(4):
            a = a @ a
        loaded = service.manager.activations.load(block, view)
        late = loaded + loaded
    del loaded
    service.manager.activations.let_go(block)
    del block
    overwritten = [torch.zeros(NBYTES // 4, device=device) for _ in range(3)]  # in whatever memory is free now
    device_module.current_stream().synchronize()
    del overwritten
    with device_module.stream(other):
        assert torch.equal(late.cpu(), expected)


@pytest.mark.schedules("eager", "late", why="its copies run when they like")
def test_a_block_wanted_back_before_its_release_never_left(device: str, service: Service, link: Link) -> None:
    tensor = make_tensor(device)
    link(SLOW)
    view, address = view_of(tensor, (0, 0, NBYTES), 0), tensor.data_ptr()
    block = service.save(tensor)
    service.do(Offload(block.key))
    service.do(Reload(block.key))
    assert service.manager.activations.load(block, view).data_ptr() == address
    assert service.manager.stats()["host.slots"] == 1, "the copy into the slot is still running"
    assert service.manager.stats()["reloaded.blocks.total"] == 0
    service.manager.activations.let_go(block)


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
    service.manager.activations.let_go(block)


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
    service.manager.activations.let_go(block)
    del block
    torch.zeros(NBYTES // 4, device=device)
    device_module.synchronize()


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


@pytest.mark.parametrize("direction", ["offload", "reload"])
def test_a_copy_that_cannot_be_started_leaves_the_block_where_it_was(
    device: str, service: Service, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor, second = make_tensor(device), make_tensor(device)
    view, expected = view_of(tensor, (0, 0, NBYTES), 0), [tensor.cpu(), second.cpu()]
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
        assert torch.equal(service.manager.activations.load(block, view).cpu(), contents)
        service.manager.activations.let_go(block)


@pytest.mark.usefixtures("careless")
def test_a_change_between_the_copy_and_the_release_is_refused(device: str, service: Service) -> None:
    """What reached the host may be the new contents."""
    tensor = make_tensor(device)
    view = view_of(tensor, (0, 0, NBYTES), 0)
    block = service.save(tensor)
    service.do(Offload(block.key))
    tensor.add_(1)
    service.do(Release(block.key))
    with pytest.raises(ChangedTensor, match="changed in place"):
        service.manager.activations.load(block, view)
    service.manager.activations.let_go(block)


def test_a_change_of_what_was_loaded_is_refused_at_the_next_load(device: str, service: Service) -> None:
    tensor = make_tensor(device)
    view = view_of(tensor, (0, 0, NBYTES), 0)
    block = service.save(tensor)
    del tensor
    service.do(Offload(block.key))
    service.do(Release(block.key))
    service.manager.activations.load(block, view).add_(1)
    with pytest.raises(ChangedTensor, match="changed in place"):
        service.manager.activations.load(block, view)
    service.manager.activations.let_go(block)


def test_new_contents_are_a_new_block(device: str, service: Service) -> None:
    """The same storage, saved before and after a change: the first save is refused, the second is right."""
    tensor = make_tensor(device)
    view = view_of(tensor, (0, 0, NBYTES), 0)
    old = service.save(tensor)
    tensor.add_(1)
    new = service.save(tensor)
    expected = tensor.cpu()
    del tensor
    for block in (old, new):
        service.do(Offload(block.key))
        service.do(Release(block.key))
    assert torch.equal(service.manager.activations.load(new, view).cpu(), expected)
    with pytest.raises(ChangedTensor):
        service.manager.activations.load(old, view)
    service.manager.activations.let_go(old)
    service.manager.activations.let_go(new)


def test_a_slot_whose_copy_has_ended_is_used_again(
    device: str, device_module: Any, service: Service, link: Link
) -> None:
    link(SLOW)
    for _ in range(2):
        block = service.save(make_tensor(device))
        service.do(Offload(block.key))
        service.manager.activations.let_go(block)
        device_module.synchronize()
    assert service.manager.stats()["host.used.peak"] == NBYTES


def test_an_early_reload_that_finds_the_device_full_is_put_off(
    device: str, device_module: Any, service: Service
) -> None:
    tensor = make_tensor(device)
    expected, view = tensor.cpu(), view_of(tensor, (0, 0, NBYTES), 0)
    block = service.save(tensor)
    del tensor
    service.do(Offload(block.key))
    service.do(Release(block.key))
    device_module.empty_cache()
    device_module.set_per_process_memory_fraction(1e-4)
    try:
        service.do(Reload(block.key))
        with pytest.raises(torch.OutOfMemoryError):
            service.manager.activations.load(block, view)
    finally:
        device_module.set_per_process_memory_fraction(1.0)
    assert service.manager.stats()["reloads_postponed.total"] == 1
    assert torch.equal(service.manager.activations.load(block, view).cpu(), expected)
    service.manager.activations.let_go(block)


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
        service.manager.activations.let_go(first)
        assert not copied.query()
        service.do(Offload(second.key))
        assert copied.query()
        service.manager.activations.let_go(second)
        assert manager.stats()["host.waits.total"] == 1
        assert manager.stats()["kept.blocks.total"] == 0

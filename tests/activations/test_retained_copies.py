"""Blocks whose copy on the host stays there when they come back, so that they can leave again without another."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from benchmarks.peak import Peak
from tests.conftest import Link
from tests.manager.test_auto import make
from tests.models import eventually, is_empty
from tests.service import NBYTES, SLOW, OnCommand, Service, make_tensor, view_of_all
from tiered_mem import TieringManager
from tiered_mem.activations.block import Block, View
from tiered_mem.policies import Offload, Place, Release, Reload, Retain

pytestmark = pytest.mark.usefixtures("no_gc")


def returned(service: Service, tensor: torch.Tensor) -> tuple[Block, View]:
    """A block that has left and come back, with its copy on the host, and was read."""
    view = view_of_all(tensor)
    block = service.save(tensor)
    service.do(Offload(block.key), Release(block.key))
    service.do(Retain(block.key), Reload(block.key))
    service.manager._activations.load(block, view)
    return block, view


def test_it_leaves_again_without_a_copy(device: str, service: Service) -> None:
    tensor = make_tensor(device)
    expected = tensor.cpu()
    block, view = returned(service, tensor)
    del tensor
    for times in (2, 3):
        service.do(Offload(block.key), Release(block.key))
        assert block.place is Place.HOST
        assert block.tensor is None
        service.do(Retain(block.key), Reload(block.key))
        assert torch.equal(service.manager._activations.load(block, view).cpu(), expected)
        stats = service.manager.stats()
        assert stats["offloaded.blocks.total"] == 1
        assert stats["reloaded.blocks.total"] == stats["released.blocks.total"] == times
    service.let_go(block)
    assert eventually(lambda: is_empty(service.manager)), service.manager.stats()


def test_it_is_used_while_it_is_copied_and_leaves_after_that(device: str, service: Service) -> None:
    tensor = make_tensor(device)
    expected = tensor.cpu()
    view = view_of_all(tensor)
    block = service.save(tensor)
    service.do(Offload(block.key))
    used = service.manager._activations.load(block, view)
    assert torch.equal(used.cpu(), expected)
    assert (used.data_ptr(), block.place) == (tensor.data_ptr(), Place.LEAVING)
    del tensor, used
    service.do(Release(block.key))
    assert (block.place, block.tensor) == (Place.HOST, None)
    assert torch.equal(service.manager._activations.load(block, view).cpu(), expected)
    assert service.manager.stats()["offloaded.blocks.total"] == 1
    service.let_go(block)
    assert eventually(lambda: is_empty(service.manager)), service.manager.stats()


def test_without_advice_the_next_one_is_copied(device: str, service: Service) -> None:
    block, view = returned(service, make_tensor(device))
    service.do(Offload(block.key), Release(block.key), Reload(block.key))
    service.manager._activations.load(block, view)
    service.do(Offload(block.key))
    assert service.manager.stats()["offloaded.blocks.total"] == 2
    service.let_go(block)
    assert eventually(lambda: is_empty(service.manager)), service.manager.stats()


def test_what_was_changed_meanwhile_stays(device: str, service: Service) -> None:
    block, _ = returned(service, make_tensor(device))
    assert block.tensor is not None
    block.tensor.add_(1)
    service.do(Offload(block.key), Release(block.key))
    assert (block.place, block.stuck) == (Place.DEVICE, True)
    service.let_go(block)
    assert eventually(lambda: is_empty(service.manager)), service.manager.stats()


@pytest.mark.schedules("eager", "late", why="its copies run when they like")
def test_it_is_not_handed_out_before_the_reload_from_it_has_ended(
    device: str, service: Service, link: Link
) -> None:
    tensor = make_tensor(device)
    block = service.save(tensor)
    del tensor
    service.do(Offload(block.key), Release(block.key))
    link(SLOW)
    service.do(Retain(block.key), Reload(block.key))
    service.let_go(block)
    del block
    assert int(service.manager.stats()["host.used.current"]) >= NBYTES
    service.manager.synchronize()
    assert service.manager.stats()["host.used.current"] == 0


def test_one_that_is_wanted_back_at_once_never_left(device: str, service: Service) -> None:
    tensor = make_tensor(device)
    expected = tensor.cpu()
    block, view = returned(service, tensor)
    del tensor
    service.do(Offload(block.key))
    service.do(Reload(block.key))
    assert torch.equal(service.manager._activations.load(block, view).cpu(), expected)
    assert service.manager.stats()["reloaded.blocks.total"] == 1
    service.let_go(block)
    assert eventually(lambda: is_empty(service.manager)), service.manager.stats()


def test_what_leaves_is_worth_more_than_what_may_leave_again(device: str) -> None:
    """The host has room for one block. A copy that is only there for later gives way."""
    service = Service(device)
    policy = OnCommand()
    with TieringManager(policy=policy, device=device, host_bytes=NBYTES + 4096) as manager:
        service.manager, service._policy = manager, policy
        block, view = returned(service, tensor := make_tensor(device))
        expected = tensor.cpu()
        other = service.save(torch.ones(NBYTES // 4, device=device))
        service.do(Offload(other.key), Release(other.key))
        assert (other.place, manager.stats()["kept.blocks.total"]) == (Place.HOST, 0)
        service.let_go(other)
        service.do(Offload(block.key), Release(block.key))
        assert manager.stats()["offloaded.blocks.total"] == 3, "it is copied anew"
        assert torch.equal(manager._activations.load(block, view).cpu(), expected)
        service.let_go(block)
        assert eventually(lambda: is_empty(manager)), manager.stats()


def test_a_planned_second_backward_copies_nothing_a_second_time(
    device: str, device_module: ModuleType, link: Link
) -> None:
    """As with a schedule that splits each backward in two."""

    def train(model: torch.nn.Module, x: torch.Tensor, manager: TieringManager | None = None) -> list[torch.Tensor]:
        grads: list[torch.Tensor] = []
        for _ in range(6):
            loss = model(x).pow(2).mean()
            loss.backward(retain_graph=True)
            loss.backward()
            grads = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
            model.zero_grad()
            if manager is not None:
                stats = manager.stats()
                crossed.append((int(stats["offloaded.bytes.total"]), int(stats["reloaded.bytes.total"])))
        return grads

    crossed: list[tuple[int, int]] = []
    model, x = make(device)
    floor = device_module.memory_allocated()
    device_module.reset_peak_memory_stats()
    expected = train(model, x)
    budget = int(floor + 0.5 * (device_module.max_memory_allocated() - floor))
    model, x = make(device)
    link("1GB/s")
    with (
        TieringManager(
            policy="auto", device_budget=budget, device=device, host_bytes="32MiB", recompute=False
        ) as manager,
        manager.attach(model, min_bytes=4096),
    ):
        most = Peak(device_module)
        found = train(model, x, manager)
        assert most.read() <= budget
        assert all(map(torch.equal, found, expected))
        out, back = (now - before for now, before in zip(crossed[-1], crossed[-2], strict=True))
        assert 0 < out < 0.75 * back

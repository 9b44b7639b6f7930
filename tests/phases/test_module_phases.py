"""manager.offload and manager.reload with modules: there and back, in training, again and in parts."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.conftest import Link, MakeManager
from tests.models import same, stack, take_gradients
from tests.phases.modules import MIB, SIDE, contents, mixed, parked
from tiered_mem import OffloadRefused, TieringManager

# There and back.


def test_a_module_comes_back_bit_equal(manager: TieringManager, device: str) -> None:
    model = mixed(device)
    before, tensors = contents(model), [*model.parameters(), *model.buffers()]
    versions = [tensor._version for tensor in tensors]
    manager.offload(model)
    assert parked(manager) == 2 * MIB + SIDE * (4 + 8) + 8
    manager.reload(model)
    assert same(contents(model), before)
    for old, new in zip(tensors, [*model.parameters(), *model.buffers()], strict=True):
        assert old is new
        assert type(new) in (torch.Tensor, nn.Parameter)
    assert [tensor._version for tensor in tensors] == versions
    assert not model.second.weight.requires_grad
    assert model.elsewhere.device.type != device


def test_the_device_memory_is_free_when_offload_returns(
    manager: TieringManager, device: str, device_module: Any
) -> None:
    model = mixed(device)
    if device == "cpu":
        pytest.skip("torch does not count the cpu's memory")
    before = device_module.memory_allocated()
    manager.offload(model)
    away = device_module.memory_allocated()
    assert before - away >= 2 * MIB
    other = torch.ones(2 * MIB, dtype=torch.uint8, device=device)
    del other
    manager.reload(model)
    assert device_module.memory_allocated() == before


@pytest.mark.schedules("eager", why="it looks at which memory the allocator hands out")
def test_memory_that_is_free_is_not_read_any_more(manager: TieringManager, device: str, link: Link) -> None:
    """The copies have ended when the allocator hands the memory out again."""
    model = mixed(device)
    before, taken = contents(model), {p.data_ptr() for p in model.parameters()}
    link("100MB/s")
    manager.offload(model)
    others = [torch.full((SIDE, SIDE), 7.0, device=device) for _ in range(4)]
    assert taken & {other.data_ptr() for other in others}
    manager.reload(model)
    assert same(contents(model), before)


def test_work_before_and_after_is_ordered_with_the_copies(manager: TieringManager, device: str, link: Link) -> None:
    """On a slow link, with work that is still queued when the module leaves, and begins when it has come back."""
    link("200MB/s")
    layer = nn.Linear(SIDE, SIDE).to(device)
    x = torch.ones(4, SIDE, device=device)
    with torch.no_grad():
        for number in range(5):
            layer.weight.fill_(number)
            layer.weight.add_(1)
            manager.offload(layer)
            manager.reload(layer)
            y = functional.linear(x, layer.weight)
            layer.weight.mul_(2)
            assert torch.equal(y.cpu(), torch.full((4, SIDE), SIDE * (number + 1.0)))
            assert torch.equal(layer.weight.cpu(), torch.full((SIDE, SIDE), 2 * (number + 1.0)))


def test_an_offload_on_another_stream_waits_for_the_reload(
    manager: TieringManager, device: str, device_module: Any, link: Link
) -> None:
    layer = nn.Linear(SIDE, SIDE).to(device)
    before = contents(layer)
    manager.offload(layer)
    others = [torch.full((SIDE, SIDE), 7.0, device=device) for _ in range(4)]
    device_module.synchronize()
    del others
    link(h2d="50MB/s")
    manager.reload(layer)
    with device_module.stream(device_module.Stream()):
        manager.offload(layer)
    manager.reload(layer)
    assert same(contents(layer), before)


def test_a_trace_takes_phases(device: str) -> None:
    layer = nn.Linear(SIDE, SIDE).to(device)
    with TieringManager(policy="layer-order", device=device, host_bytes="8MiB", trace=True) as manager:
        manager.offload(layer)
        assert re.search(r"modules, offloaded now +2 storages, 1\.0 MiB\n", manager.memory_summary())
        manager.reload(layer)
        manager.synchronize()
        assert re.search(r"host memory for modules +1\.0 MiB\n", manager.memory_summary())
        assert re.search(r"reload copies +1\.0 MiB", manager.memory_summary())


def train(device: str, between: Callable[[nn.Module, int], None]) -> dict[str, torch.Tensor]:
    model, x = stack(3, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        loss = model(x)
        loss.backward()
        optimizer.step()
        between(model, step)
        optimizer.zero_grad()
    return contents(model)


def test_training_with_phases_is_bit_equal(make_manager: MakeManager, device: str) -> None:
    manager = make_manager(2)

    def away(model: nn.Module, step: int) -> None:
        manager.offload(model, gradients=step % 2 == 0)
        assert parked(manager) > 0
        manager.reload(model)

    assert same(train(device, away), train(device, lambda model, step: None))


def test_phases_and_offloaded_activations_share_a_manager(make_manager: MakeManager, device: str) -> None:
    manager = make_manager(2)
    model, x = stack(3, device)
    model(x).backward()
    expected = take_gradients(model)
    for _ in range(2):
        with manager.offload_context(model.layers, min_bytes=1024):
            loss = model(x)
        loss.backward()
        assert same(take_gradients(model), expected)
        manager.offload(model)
        manager.reload(model)


def test_another_model_may_be_away_meanwhile(manager: TieringManager, device: str) -> None:
    actor, critic = (nn.Linear(SIDE, SIDE).to(device) for _ in range(2))
    before = contents(actor), contents(critic)
    for _ in range(2):
        manager.offload(actor)
        manager.reload(critic)
        manager.offload(critic)
        manager.reload(actor)
    manager.reload(critic)
    assert same(contents(actor), before[0])
    assert same(contents(critic), before[1])


# Again, and in parts.


def test_offload_and_reload_are_idempotent(manager: TieringManager, device: str) -> None:
    model = mixed(device)
    before = contents(model)
    manager.reload(model)
    assert same(contents(model), before)
    for _ in range(2):
        manager.offload(model)
    assert parked(manager) == 2 * MIB + SIDE * 12 + 8
    for _ in range(2):
        manager.reload(model)
        assert same(contents(model), before)


@pytest.mark.parametrize("inner_first", [True, False])
def test_a_part_may_go_before_the_whole_and_come_back_before_it(
    manager: TieringManager, device: str, inner_first: bool
) -> None:
    model = mixed(device)
    before = contents(model)
    manager.offload(model.first)
    assert parked(manager) == MIB + 4 * SIDE
    manager.offload(model)
    assert parked(manager) == 2 * MIB + SIDE * 12 + 8
    if inner_first:
        manager.reload(model.first)
        assert parked(manager) == MIB + SIDE * 8 + 8
        assert torch.equal(model.first.weight.cpu(), before["first.weight"])
    manager.reload(model)
    assert same(contents(model), before)


def test_a_module_that_only_holds_others_may_be_forgotten(manager: TieringManager, device: str) -> None:
    one, other = nn.Linear(8, 8).to(device), nn.Linear(8, 8).to(device)
    before = contents(one), contents(other)
    manager.offload(nn.ModuleList([one, other]))
    manager.reload(one)
    manager.reload(nn.ModuleList([other]))
    assert same(contents(one), before[0])
    assert same(contents(other), before[1])


def test_only_the_manager_that_has_a_module_brings_it_back(make_manager: MakeManager, device: str) -> None:
    one, other = make_manager(1), make_manager(1)
    layer = nn.Linear(8, 8).to(device)
    before = contents(layer)
    one.offload(layer)
    for call in (other.offload, other.reload):
        with pytest.raises(OffloadRefused, match="by another manager"):
            call(layer)
    one.reload(layer)
    other.offload(layer)
    assert one.stats()["host.slots"] == 0
    other.reload(layer)
    assert same(contents(layer), before)

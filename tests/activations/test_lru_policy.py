"""LRUPolicy on a device: the budget that it counts is the one that the device sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.models import eventually, is_empty, same, stack, take_gradients
from tiered_mem import TieringManager
from tiered_mem.policies import LRUPolicy

LAYERS = 6  # each saves about 5 MiB
KEPT_ANYWAY = 1 << 20  # the model's output, and what is too small to be moved

pytestmark = pytest.mark.usefixtures("no_gc")


@pytest.fixture
def managed(device: str) -> Iterator[Callable[[str], TieringManager]]:
    managers: list[TieringManager] = []

    def make(device_bytes: str) -> TieringManager:
        managers.append(TieringManager(policy=LRUPolicy(device_bytes), device=device, host_bytes="128MiB"))
        return managers[-1]

    yield make
    for manager in managers:
        assert eventually(lambda manager=manager: is_empty(manager)), manager.memory_summary()
        manager.close()


@pytest.mark.parametrize("device_bytes", ["256KiB", "2MiB", "8MiB", "16MiB", "64MiB"])
def test_gradients_are_bit_equal_with_graphs_in_flight(
    device: str, managed: Callable[[str], TieringManager], device_bytes: str
) -> None:
    model, x = stack(LAYERS, device)
    (model(x) + model(2 * x)).backward()
    expected = take_gradients(model)
    offload = managed(device_bytes).offload_context(model.layers, min_bytes=1024)

    def forwards() -> tuple[torch.Tensor, torch.Tensor]:
        with offload:
            first = model(x)
        with offload:
            return first, model(2 * x)

    first, second = forwards()
    (first + second).backward()
    assert same(take_gradients(model), expected)
    first, second = forwards()
    first.backward()
    second.backward()
    assert same(take_gradients(model), expected)


@pytest.mark.parametrize(("device_bytes", "budget"), [("8MiB", 8 << 20), ("16MiB", 16 << 20)])
def test_the_device_holds_no_more_than_the_budget_and_backward_waits_for_nothing(
    device: str, device_module: Any, managed: Callable[[str], TieringManager], device_bytes: str, budget: int
) -> None:
    model, x = stack(LAYERS, device)
    manager = managed(device_bytes)
    offload = manager.offload_context(model.layers, min_bytes=1024)
    before = device_module.memory_allocated()
    with offload:
        loss = model(x)
    assert budget / 2 < device_module.memory_allocated() - before < budget + KEPT_ANYWAY
    loss.backward()
    stats = manager.stats()
    assert int(stats["reloaded.blocks.total"]) > 0
    assert stats["reloads_on_demand.total"] == 0


def test_the_budget_is_kept_when_the_graph_is(
    device: str, device_module: Any, managed: Callable[[str], TieringManager]
) -> None:
    model, x = stack(LAYERS, device)
    model(x).backward()
    expected = take_gradients(model)
    offload = managed("16MiB").offload_context(model.layers, min_bytes=1024)
    before = device_module.memory_allocated()
    with offload:
        loss = model(x)
    for _ in range(2):
        loss.backward(retain_graph=True)
        assert same(take_gradients(model), expected)
        assert device_module.memory_allocated() - before < (16 << 20) + KEPT_ANYWAY

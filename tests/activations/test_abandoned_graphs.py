"""Graphs that are abandoned, fail, or outlive their manager: the next step is right, and nothing is left."""

from __future__ import annotations

import gc
import weakref
from typing import Any, Literal

import pytest
import torch

from tests.conftest import EMULATED, MakeManager
from tests.models import backward, equal, eventually, gradients_of, is_empty, small_stack, stack
from tiered_mem import TieringManager
from tiered_mem.tiers.host_tier import Form

pytestmark = pytest.mark.usefixtures("no_gc")


def test_abandoned_forwards_then_a_normal_step(device: str, make_manager: MakeManager) -> None:
    model, x = small_stack(3, device)
    expected = backward(model(x), model, x)
    manager = make_manager(2)
    offload = manager.offload_context(model.layers, min_bytes=1)
    for _ in range(3):
        with offload:
            loss = model(x)
        del loss
        assert is_empty(manager)
    with offload:
        loss = model(x)
    assert equal(backward(loss, model, x), expected)
    assert manager.stats()["reloads_on_demand.total"] == 0


def test_exceptions_then_a_normal_step(device: str, make_manager: MakeManager) -> None:
    model, x = small_stack(3, device)
    expected = backward(model(x), model, x)
    manager = make_manager(2)
    offload = manager.offload_context(model.layers, min_bytes=1)

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    for target in (model.layers[1].norm, model.layers[2].down):
        handle = target.register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt), offload:
            model(x)
        handle.remove()
        assert is_empty(manager)
        handle = target.weight.register_hook(fail)
        with offload:
            loss = model(x)
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
        handle.remove()
        gradients_of(model, x)
        del loss
        for _ in range(2):
            with offload:
                loss = model(x)
            assert equal(backward(loss, model, x), expected)
            del loss
    assert manager.stats()["reloads_on_demand.total"] == 0


def test_losses_that_are_kept(device: str, make_manager: MakeManager) -> None:
    """A loss that is kept for a mean at the end of the epoch keeps its graph, but no activation."""
    model, x = small_stack(2, device)
    expected = backward(model(x), model, x)
    manager = make_manager()
    offload = manager.offload_context(model.layers, min_bytes=1)
    losses = []
    for _ in range(4):
        with offload:
            losses.append(model(x))
        assert equal(backward(losses[-1], model, x), expected)
        assert is_empty(manager)
    assert len({loss.item() for loss in losses}) == 1


@pytest.mark.parametrize("first", ["manager", "graph"])
def test_a_manager_that_is_forgotten(device: str, device_module: Any, first: str) -> None:
    """Without close() and without the garbage collector: with the last of its graphs its host memory is free."""
    if EMULATED:
        limit_host("256MiB")
    model, x = small_stack(2, device)
    expected = backward(model(x), model, x)
    try:
        for _ in range(3):  # all of them together need more memory than can be pinned
            manager = TieringManager(policy="layer-order", device=device, host_bytes="100MiB")
            gone = weakref.ref(manager)
            offload = manager.offload_context(model.layers, min_bytes=1)
            with offload:
                loss = model(x)
            assert manager.stats()["host.reserved.current"] == 100 << 20
            assert manager.stats()["kept.blocks.total"] == 0
            if first == "manager":
                del manager, offload
                assert equal(backward(loss, model, x), expected)
                del loss
            else:
                assert equal(backward(loss, model, x), expected)
                del loss
                del manager, offload
            assert eventually(lambda gone=gone: gone() is None)
    finally:
        if EMULATED:
            limit_host("0")


@pytest.mark.parametrize("residency", ["host", "auto"])
@pytest.mark.parametrize("closed", [True, False])
def test_a_training_that_is_forgotten(closed: bool, residency: Literal["host", "auto"], device: str) -> None:
    """An attached model, its weights, a tiered optimizer and its states: all go without the garbage collector."""

    def train(steps: int) -> list[weakref.ref[Any]]:
        model, x = stack(2, device)
        manager = TieringManager(policy="auto", device=device, device_budget="1GiB", host_bytes="64MiB")
        manager.attach(model, min_bytes=1)
        optimizer = manager.register_optimizer(torch.optim.AdamW(model.parameters()), residency=residency)
        for _ in range(steps):
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
        if closed:
            manager.close()
        return [weakref.ref(each) for each in (model, next(model.parameters()), optimizer, optimizer.states)]

    train(2)  # torch keeps what its first step was made with
    assert [each() for each in train(4)] == [None] * 4


@pytest.mark.skipif(not EMULATED, reason="only the emulated runtime has a limit that can be set")
def test_a_manager_that_got_less_than_it_asked_for_is_forgotten_as_well(device: str, no_gc: None) -> None:
    limit_host("64MiB")
    try:
        manager = TieringManager(policy="layer-order", device=device, host_bytes="100MiB")
        assert 0 < manager.stats()["host.reserved.current"] <= 64 << 20
        gone = weakref.ref(manager)
        del manager
        assert gone() is None
    finally:
        limit_host("0")


def limit_host(size: str) -> None:
    """Of what torch has pinned for tests before, nothing may count."""
    import ascend_emulator

    torch.npu.host_empty_cache()
    ascend_emulator.configure(host_bytes=size)


def test_nothing_of_a_step_is_left(device: str, make_manager: MakeManager) -> None:
    """A forward has a hundred small objects. Once its loss is gone, none of them lives on."""
    model, x = small_stack(2, device)
    manager = make_manager(1)
    offload = manager.offload_context(model.layers, min_bytes=1)

    def step() -> None:
        with offload:
            loss = model(x)
        loss.backward()

    def ours() -> int:
        """All but the forms of what slabs were cut into, which they remember."""
        things = (thing for thing in gc.get_objects() if type(thing) is not Form)
        return sum(str(type(thing).__module__).startswith("tiered_mem") for thing in things)

    step()  # brings the first slab
    assert eventually(lambda: is_empty(manager))
    before = ours()
    for _ in range(3):
        step()
    assert eventually(lambda: is_empty(manager) and ours() <= before)

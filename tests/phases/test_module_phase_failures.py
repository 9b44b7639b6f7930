"""Phases whose copies cannot be started: nothing is running afterwards, and all is where it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.conftest import EMULATED, Link
from tests.models import same
from tests.phases.modules import contents, parked
from tests.service import SLOW, interrupt_second_copy
from tiered_mem import TieringManager
from tiered_mem.allocators import AclPinnedMemory, SlabPool

pytestmark = [
    pytest.mark.usefixtures("no_gc"),
    pytest.mark.skipif(not EMULATED, reason="only the emulator's race detector can tell"),
]
SIDE = 1800  # a weight of 12 MiB; above 10 the caching allocator gives a tensor a segment of its own


def two_layers(device: str) -> nn.Module:
    return nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(2))).to(device)


def test_nothing_is_running_after_an_offload_that_failed(
    device: str, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host memory is free, and goes back to the system here at once."""
    module = two_layers(device)
    before = contents(module)
    pool = SlabPool(AclPinnedMemory())
    manager = TieringManager(policy="lru", device=device, host_pool=pool)
    link(SLOW)
    interrupt_second_copy(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        manager.offload(module)
    assert parked(manager) == 0
    pool.close()
    manager.close()
    assert same(contents(module), before)


def test_nothing_is_running_after_a_reload_that_failed(
    device: str, link: Link, monkeypatch: pytest.MonkeyPatch, manager: TieringManager
) -> None:
    """Its device memory is free, and used by others here at once."""
    module = two_layers(device)
    before = contents(module)
    size = sum(tensor.nbytes for tensor in before.values())
    manager.offload(module)
    link(SLOW)
    interrupt_second_copy(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        manager.reload(module)
    assert parked(manager) == size
    others = [torch.ones(SIDE, SIDE, device=device) for _ in before]
    link()
    monkeypatch.undo()
    manager.reload(module)
    assert same(contents(module), before)
    assert all(torch.equal(other.cpu(), torch.ones(SIDE, SIDE)) for other in others)

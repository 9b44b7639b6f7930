"""A manager that does what it is told, block by block."""

from __future__ import annotations

import pytest
import torch

from tiered_mem import TieringManager
from tiered_mem.activations.block import Block, View, origin_of
from tiered_mem.allocators import SlabPool
from tiered_mem.policies import Action, Event, LayerEnd
from tiered_mem.tiers.host_tier import Form

NBYTES = 12 << 20  # above 10 MiB the caching allocator gives a tensor a segment of its own
SLOW = "50MB/s"  # a quarter of a second for a copy


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
        host_bytes = "64MiB" if host_pool is None else None
        self.manager = TieringManager(
            policy=self._policy, device=device, host_bytes=host_bytes, host_pool=host_pool
        )

    def save(self, tensor: torch.Tensor) -> Block:
        return self.manager._activations.save(tensor, graph=0, layer=0)[0]

    def let_go(self, block: Block) -> None:
        """As a saved tensor does that dies."""
        self.manager._activations.dropped.append(block)
        self.manager._activations.free_dropped()

    def do(self, *actions: Action) -> None:
        self._policy.next = list(actions)
        self.manager._activations.notify(LayerEnd(graph=0, layer=0))


def make_tensor(device: str, nbytes: int = NBYTES) -> torch.Tensor:
    """Random numbers in memory that, once freed, is what the caching allocator hands out for this size."""
    module = getattr(torch, device)
    module.synchronize()
    module.empty_cache()
    tensor = torch.randn(nbytes // 4).to(device)
    module.synchronize()
    return tensor


def interrupt_second_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of copies that are started together only the first is."""
    copy = torch._foreach_copy_

    def copy_first(to: list[torch.Tensor], of: list[torch.Tensor], non_blocking: bool) -> None:
        copy(to[:1], of[:1], non_blocking=non_blocking)
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "_foreach_copy_", copy_first)


def view_of_all(tensor: torch.Tensor) -> View:
    """How a tensor that has its storage to itself lies in its block."""
    form = Form(tensor.nbytes, tensor.dtype, tensor.shape, tensor.stride())
    return View(form, 0, 0, origin_of(tensor))

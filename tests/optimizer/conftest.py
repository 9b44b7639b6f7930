"""Tiered optimizers for tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tiered_mem import TieringManager
from tiered_mem.optimizer.tiered_optimizer import TieredOptimizer


class MakeTiered:
    """Makes tiered optimizers, of which nothing may be left at the end of the test."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._managers: list[TieringManager] = []

    def __call__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        residency: str = "host",
        bucket_bytes: int | str = 8192,
        host_bytes: str = "64MiB",
    ) -> TieredOptimizer:
        self._managers.append(TieringManager(policy="lru", device=self._device, host_bytes=host_bytes))
        return self.manager.register_optimizer(optimizer, bucket_bytes=bucket_bytes, residency=residency)

    @property
    def manager(self) -> TieringManager:
        """Of the optimizer that was made last."""
        return self._managers[-1]

    def check(self) -> None:
        for manager in self._managers:
            manager.close()
            stats = manager.stats()
            assert stats["host.slots"] == 0
            assert stats["host.used.current"] == 0


@pytest.fixture
def make_tiered(device: str) -> Iterator[MakeTiered]:
    make = MakeTiered(device)
    yield make
    make.check()

"""Tiered optimizers and residences for tests, and the places of their states."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
import torch

from tests.optimizer.rig import MIB, Rig
from tests.optimizer.training import PLACES, Place
from tests.spill.declared_files import DeclaredFiles
from tiered_mem import TieringManager
from tiered_mem.optimizer.registered import Overlap
from tiered_mem.optimizer.tiered_optimizer import TieredOptimizer
from tiered_mem.spill.disk_tier import DiskTier


class MakeTiered:
    """Makes tiered optimizers, of which nothing may be left at the end of the test."""

    def __init__(self, device: str, folder: Path) -> None:
        self._device = device
        self._folder = folder
        self._managers: list[TieringManager] = []

    def __call__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        residency: str = "host",
        bucket_bytes: int | str = 8192,
        host_bytes: str = "32MiB",
        device: str | None = None,
        separable: bool | None = None,
        overlap: Overlap | None = None,
        keep_gradients: bool = False,
    ) -> TieredOptimizer:
        device = device or self._device
        disk = DiskTier(self._folder, capacity=64 << 20, files=DeclaredFiles()) if residency == "disk" else None
        self._managers.append(TieringManager(policy="lru", device=device, host_bytes=host_bytes, disk=disk))
        return self.manager.register_optimizer(
            optimizer,
            bucket_bytes=bucket_bytes,
            residency=residency,
            separable=separable,
            overlap=overlap,
            keep_gradients=keep_gradients,
        )

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
        assert list(self._folder.iterdir()) == []


@pytest.fixture
def make_tiered(device: str, tmp_path: Path) -> Iterator[MakeTiered]:
    folder = tmp_path / "spill"
    folder.mkdir()
    make = MakeTiered(device, folder)
    yield make
    make.check()


@pytest.fixture(params=PLACES, ids=str)
def place(request: pytest.FixtureRequest) -> Place:
    """Each place, one after the other."""
    chosen: Place = request.param
    return chosen


class MakeRig(Protocol):
    def __call__(
        self, *, host_slots: int = 8, slots: int = 2, capacity: int = 16 * MIB, budget: int | None = None
    ) -> Rig: ...


@pytest.fixture
def make_rig(device: str, tmp_path: Path) -> Iterator[MakeRig]:
    """Makes rigs, of which nothing may be left at the end of the test."""
    rigs: list[Rig] = []

    def make(*, host_slots: int = 8, slots: int = 2, capacity: int = 16 * MIB, budget: int | None = None) -> Rig:
        rigs.append(Rig(device, tmp_path, host_slots=host_slots, slots=slots, capacity=capacity, budget=budget))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    return make_rig()

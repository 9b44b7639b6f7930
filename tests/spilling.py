"""What the tests of training with a disk tier have in common."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from tests.models import eventually, is_empty, same, stack, take_gradients
from tests.spill.declared_files import DeclaredFiles
from tiered_mem import TieringManager
from tiered_mem.policies import Policy, Spill
from tiered_mem.spill.disk_tier import DiskTier
from tiered_mem.spill.filesystem import Files

MIB = 1 << 20
LAYERS = 4
SAVED = 21 * MIB  # what the layers save, roughly


class Training:
    """A model, and the gradients that its step must have."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.model, self._x = stack(LAYERS, device)
        self.forward().backward()
        self._expected = take_gradients(self.model)

    def forward(self, manager: TieringManager | None = None) -> torch.Tensor:
        """The loss; with a manager its activations are its blocks."""
        if manager is None:
            loss: torch.Tensor = self.model(self._x)
            return loss
        with manager.offload_context(self.model.layers, min_bytes=1024):
            return self.forward()

    def is_right(self) -> bool:
        """Whether a backward has left the right gradients, to the last bit. It takes them away."""
        return same(take_gradients(self.model), self._expected)

    def step(self, manager: TieringManager) -> bool:
        self.forward(manager).backward()
        return self.is_right()


class Spilling:
    """Makes managers with a disk tier, in which nothing may be left at the end of the test."""

    def __init__(self, device: str, folder: Path) -> None:
        self._device = device
        self._folder = folder
        self._managers: list[TieringManager] = []
        self.now = 0.0

    def __call__(self, policy: Policy, host_bytes: int, *, files: Files | None = None) -> TieringManager:
        disk = DiskTier(self._folder, capacity=256 * MIB, files=files or DeclaredFiles(), clock=lambda: self.now)
        manager = TieringManager(policy=policy, device=self._device, host_bytes=host_bytes, disk=disk)
        self._managers.append(manager)
        return manager

    def check(self) -> None:
        for manager in self._managers:
            assert eventually(lambda manager=manager: is_empty(manager)), manager.stats()
            manager.close()
        assert files_in(self._folder) == []


def spill_all(manager: TieringManager) -> None:
    """Sends down whatever is on the host, and waits for it."""
    manager.synchronize()
    manager.act(Spill(key) for key in keys(manager))
    manager.synchronize()


def keys(manager: TieringManager) -> list[int]:
    return list(manager._store.blocks.by_key)


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def records_in(folder: Path) -> Iterable[Path]:
    return sorted(path for path in files_in(folder) if path.suffix == ".safetensors")

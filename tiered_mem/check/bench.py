"""What the checks work with."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from ..device.device import Device
from ..device.transfer import TransferEngine
from ..spill.filesystem import Files
from .load import Load
from .training import Trained, train


class Bench:
    """The device and the drive that are checked, and what several checks use.

    folder: a directory on the drive.
    quick: fewer rounds and steps.
    files: for tests.
    """

    def __init__(self, device: Device, folder: Path, *, quick: bool = False, files: Files | None = None) -> None:
        self.device = device
        self.folder = folder
        self.quick = quick
        self.files = files or Files()
        self.engine = TransferEngine(device)

    @property
    def steps(self) -> int:
        """How many a training has."""
        return 4 if self.quick else 6

    def rounds(self, number: int) -> int:
        """How often a small program is repeated."""
        return max(1, number // 4) if self.quick else number

    @cached_property
    def load(self) -> Load:
        return Load(self.device)

    @cached_property
    def plain(self) -> Trained:
        """The training without the library, with which others are compared."""
        train(self.device, 1)  # libraries of kernels take memory of their own at their first use, and keep it
        return train(self.device, self.steps)

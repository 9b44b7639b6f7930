"""The most that is allocated on a device."""

from __future__ import annotations

from types import ModuleType


class Peak:
    """Counts as torch does, from when it is made: what tensors have, rounded up by torch's pool.

    policy="auto" begins torch's own peak anew while it records a step. What it was is read before.
    """

    def __init__(self, device: ModuleType) -> None:
        self._device = device
        self._begin_anew = device.reset_peak_memory_stats
        self._begin_anew()
        self._most = 0
        device.reset_peak_memory_stats = self._reset

    def read(self) -> int:
        """In bytes. Ends the counting."""
        self._device.reset_peak_memory_stats = self._begin_anew
        return self._so_far()

    def _reset(self, *device: int) -> None:
        self._most = self._so_far()
        self._begin_anew(*device)

    def _so_far(self) -> int:
        now = self._device.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["peak"]
        return max(self._most, int(now))

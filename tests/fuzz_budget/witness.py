"""The most that is allocated on the device, whatever others do to torch's own count of it."""

from __future__ import annotations

from typing import Any

import torch
import torch_npu


class Witness:
    """Stands where torch's count of the peak is begun anew: what was counted until then is not lost.

    Use it as a context manager.
    """

    def __init__(self) -> None:
        self._most = self._requested = 0
        self._begin_anew: Any = torch_npu._C._npu_resetPeakMemoryStats

    def __enter__(self) -> Witness:
        torch_npu._C._npu_resetPeakMemoryStats = self._reset
        self.begin()
        return self

    def __exit__(self, *exception: object) -> None:
        torch_npu._C._npu_resetPeakMemoryStats = self._begin_anew

    def begin(self) -> None:
        """As a user does it at the begin of a step."""
        torch.npu.reset_peak_memory_stats()
        self._most = self._requested = 0

    def peak(self) -> int:
        """The most since the begin, counted as torch does."""
        self._note()
        return self._most

    def requested(self) -> int:
        """The most since the begin that was asked for, without what torch's pool gave on top."""
        self._note()
        return self._requested

    def _reset(self, *device: Any) -> None:
        self._note()
        self._begin_anew(*device)

    def _note(self) -> None:
        stats = torch.npu.memory_stats_as_nested_dict()
        self._most = max(self._most, stats["allocated_bytes"]["all"]["peak"])
        self._requested = max(self._requested, stats["requested_bytes"]["all"]["peak"])

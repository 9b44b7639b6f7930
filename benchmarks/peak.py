"""The most that is allocated on a device."""

from __future__ import annotations

from types import ModuleType


class Peak:
    """Counts by the steps of torch's allocator, from when it is made.

    torch's own figure would not do: policy="auto" resets it. Nobody else may record the allocator's history
    meanwhile.
    """

    def __init__(self, device: ModuleType) -> None:
        self._device = device
        device.memory._record_memory_history(max_entries=10_000_000, context=None, stacks="python")
        self._before = device.memory_allocated()

    def read(self) -> int:
        """In bytes. Ends the counting."""
        trace = self._device.memory._snapshot()["device_traces"][0]
        self._device.memory._record_memory_history(enabled=None)
        now = most = self._before
        for entry in trace:
            now += {"alloc": 1, "free_completed": -1}.get(entry["action"], 0) * entry["size"]
            most = max(most, now)
        return most

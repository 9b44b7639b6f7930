"""Work that keeps a device busy."""

from __future__ import annotations

import math

import torch

from ..device.device import Device, Event, Stream

_SMALLEST, _LARGEST = 256, 4096
# Shorter products could end before the host has issued the next one.
_SHORTEST_S = 4e-4
_MEASURED = 8


class Load:
    """Products of matrices, as many as take the device about as long as they are to take.

    There are many, and none is long, so that work of other streams can come in between.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        size = _SMALLEST
        while True:
            self._matrix = torch.zeros(size, size, device=device.torch_device)
            self._product = torch.zeros_like(self._matrix)
            self._each = self._seconds()
            if self._each >= _SHORTEST_S or size >= _LARGEST:
                return
            size *= 2

    def begin(self, stream: Stream, seconds: float) -> Event:
        """Puts work on a stream. The event passes when all of it has ended."""
        with self._device.on(stream):
            for _ in range(max(1, math.ceil(seconds / self._each))):
                torch.mm(self._matrix, self._matrix, out=self._product)
        return stream.record_event()

    def _seconds(self) -> float:
        stream = self._device.current_stream()
        torch.mm(self._matrix, self._matrix, out=self._product)  # the first one may load the kernel
        began = self._device.timed_event(stream)
        for _ in range(_MEASURED):
            torch.mm(self._matrix, self._matrix, out=self._product)
        ended = self._device.timed_event(stream)
        self._device.synchronize()
        return max(self._device.elapsed(began, ended) / _MEASURED, 1e-6)

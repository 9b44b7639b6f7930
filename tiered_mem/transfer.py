"""Copies between tiers that run beside compute."""

from __future__ import annotations

import torch

from .device import Device, Event, Stream
from .tiers import DeviceSlot, HostSlot


class TransferEngine:
    """Starts copies between device slots and host slots, on one side stream for each direction.

    No call waits for the device. Copies are `Tensor.copy_(non_blocking=True)` and nothing else: torch_npu queues
    its work on a thread of its own, which a copy issued below torch would overtake. Who starts a copy keeps both
    slots until the copy has ended, or until a stream that uses them next waits for it.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._to_host = device.new_stream()
        self._to_device = device.new_stream()

    def offload(self, source: DeviceSlot, destination: HostSlot) -> Ticket:
        """Copies to the host, after the work that the source's stream has been given so far."""
        self._to_host.wait_event(source.stream.record_event())
        return self._copy(self._to_host, source.tensor, destination.tensor)

    def reload(self, source: HostSlot, destination: DeviceSlot, *, after: Ticket | None) -> Ticket:
        """Copies to the device, after `after`, the copy that fills the host slot.

        It also comes after the work that the destination's stream has been given so far: the caching allocator
        hands out memory that such work may still be using.
        """
        self._to_device.wait_event(destination.stream.record_event())
        if after is not None:
            after.hold(self._to_device)
        return self._copy(self._to_device, source.tensor, destination.tensor)

    def synchronize(self) -> None:
        """Waits on the host for every copy that was started."""
        self._to_host.synchronize()
        self._to_device.synchronize()

    def _copy(self, side: Stream, source: torch.Tensor, destination: torch.Tensor) -> Ticket:
        with self._device.on(side):
            destination.copy_(source, non_blocking=True)
        return Ticket(side.record_event())


class Ticket:
    """One copy that was started."""

    __slots__ = ("_held", "event")

    def __init__(self, event: Event) -> None:
        self.event = event
        self._held: set[int] = set()

    def hold(self, stream: Stream) -> None:
        """Makes what `stream` is given from now on wait for the copy. The host does not wait."""
        if stream.stream_id not in self._held:
            stream.wait_event(self.event)
            self._held.add(stream.stream_id)

"""Copies between tiers that run beside compute."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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

    def offload(self, moves: Sequence[tuple[DeviceSlot, HostSlot]]) -> Ticket:
        """Copies to the host, after the work that the sources' streams have been given so far.

        One ticket stands for all: what leaves together is released together.
        """
        _wait_for_work(self._to_host, (source for source, _ in moves))
        with self._device.on(self._to_host):
            for source, destination in moves:
                destination.tensor.copy_(source.tensor, non_blocking=True)
        return Ticket(self._to_host.record_event())

    def reload(self, moves: Sequence[tuple[HostSlot, DeviceSlot, Ticket | None]]) -> list[Ticket]:
        """Copies to the device, each after the copy that fills its host slot, if that has a ticket.

        They also come after the work that the destinations' streams have been given so far: the caching allocator
        hands out memory that such work may still be using. Each has its own ticket, so that backward can begin with
        the first while the others are on their way.
        """
        if not moves:
            return []
        _wait_for_work(self._to_device, (destination for _, destination, _ in moves))
        tickets = []
        with self._device.on(self._to_device):
            for source, destination, filled in moves:
                if filled is not None:
                    filled.hold(self._to_device)
                destination.tensor.copy_(source.tensor, non_blocking=True)
                tickets.append(Ticket(self._to_device.record_event()))
        return tickets

    def synchronize(self) -> None:
        """Waits on the host for every copy that was started."""
        self._to_host.synchronize()
        self._to_device.synchronize()


class Ticket:
    """Copies that were started and will have ended when `event` has come to pass."""

    __slots__ = ("_held", "event")

    def __init__(self, event: Event) -> None:
        self.event = event
        self._held: set[int] = set()

    def hold(self, stream: Stream) -> None:
        """Makes what `stream` is given from now on wait for the copies. The host does not wait."""
        if stream.stream_id not in self._held:
            stream.wait_event(self.event)
            self._held.add(stream.stream_id)


def _wait_for_work(side: Stream, slots: Iterable[DeviceSlot]) -> None:
    for stream in {slot.stream.stream_id: slot.stream for slot in slots}.values():
        side.wait_event(stream.record_event())

"""Copies between tiers that run beside compute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from .device import Device, Event, Stream
from .tiers import DeviceSlot, HostSlot


class TransferEngine:
    """Starts copies between device slots and host slots, on one side stream for each direction.

    No call waits for the device. Copies are torch's own, with non_blocking=True, and nothing else: torch_npu queues
    its work on a thread of its own, which a copy issued below torch would overtake. Who starts a copy keeps both
    slots until the copy has ended, or until a stream that uses them next waits for it.

    stream: one stream for both directions, in place of two of the engine's own.
    """

    def __init__(self, device: Device, stream: Stream | None = None) -> None:
        self._device = device
        self._to_host = stream or device.new_stream()
        self._to_device = stream or device.new_stream()

    def offload(self, moves: Sequence[tuple[DeviceSlot, HostSlot]]) -> Ticket:
        """Copies to the host, after the work that the sources' streams have been given so far.

        One ticket stands for all: what leaves together is released together.
        """
        _wait_for_work(self._to_host, (source for source, _ in moves))
        with self._device.on(self._to_host):
            _copy([(destination.tensor, source.tensor) for source, destination in moves])
        return Ticket(self._to_host.record_event())

    def reload(self, moves: Sequence[tuple[HostSlot, DeviceSlot, Ticket | None]]) -> list[Ticket]:
        """Copies to the device, each after the copy that fills its host slot, if that has a ticket.

        They also come after the work that the destinations' streams have been given so far: the caching allocator
        hands out memory that such work may still be using. Returns the ticket of each: backward can begin with the
        first of many while the others are on their way.
        """
        if not moves:
            return []
        _wait_for_work(self._to_device, (destination for _, destination, _ in moves))
        tickets: list[Ticket] = []
        with self._device.on(self._to_device):
            for group in _groups(moves):
                for _, destination, filled in group:
                    # Where the destination's stream has waited for that copy already, so has this one.
                    if filled is not None and not filled.held_by(destination.stream):
                        filled.hold(self._to_device)
                _copy([(destination.tensor, source.tensor) for source, destination, _ in group])
                tickets += [Ticket(self._to_device.record_event())] * len(group)
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

    def held_by(self, stream: Stream) -> bool:
        """Whether `stream` has been made to wait."""
        return stream.stream_id in self._held

    def hold(self, stream: Stream) -> None:
        """Makes what `stream` is given from now on wait for the copies. The host does not wait."""
        if stream.stream_id not in self._held:
            stream.wait_event(self.event)
            self._held.add(stream.stream_id)


# What arrives together is waited for together: an event for each small tensor would cost more than it could save.
_GROUP_BYTES = 4 << 20


def _groups(
    moves: Sequence[tuple[HostSlot, DeviceSlot, Ticket | None]],
) -> Iterator[Sequence[tuple[HostSlot, DeviceSlot, Ticket | None]]]:
    first, nbytes = 0, 0
    for end, (source, _, _) in enumerate(moves, start=1):
        nbytes += source.region.nbytes
        if nbytes >= _GROUP_BYTES or end == len(moves):
            yield moves[first:end]
            first, nbytes = end, 0


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copies to the first tensor of each pair, in order on the current stream. One call costs the host less."""
    torch._foreach_copy_([to for to, _ in pairs], [of for _, of in pairs], non_blocking=True)


def _wait_for_work(side: Stream, slots: Iterable[DeviceSlot]) -> None:
    for stream in {slot.stream.stream_id: slot.stream for slot in slots}.values():
        side.wait_event(stream.record_event())

"""Copies between tiers that run beside compute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from .device import Device, Event, Stream
from .host_tier import DeviceSlot, HostSlot
from .trace.recorder import Trace
from .trace.timeline import Direction


class TransferEngine:
    """Starts copies between device slots and host slots, on one side stream for each direction.

    No call waits for the device. Copies are torch's own, with non_blocking=True, and nothing else: torch_npu queues
    its work on a thread of its own, which a copy issued below torch would overtake. Who starts a copy keeps both
    slots until the copy has ended, or until a stream that uses them next waits for it.

    stream: one stream for both directions, in place of two of the engine's own.
    trace: is told of the copies, and of who waits for them. It may be exchanged.
    """

    def __init__(self, device: Device, stream: Stream | None = None, trace: Trace | None = None) -> None:
        self._device = device
        self.trace = trace
        self._to_host = stream or device.new_stream()
        self._to_device = stream or device.new_stream()

    def offload(self, moves: Sequence[tuple[DeviceSlot, HostSlot]]) -> Ticket:
        """Copies to the host, after the work that the sources' streams have been given so far.

        One ticket stands for all: what leaves together is released together.
        """
        _wait_for_work(self._to_host, [source for source, _ in moves])
        with self._device.on(self._to_host):
            to, of = [slot.tensor for _, slot in moves], [slot.tensor for slot, _ in moves]
            return self._copy("offload", self._to_host, to, of)

    def reload(self, moves: Sequence[tuple[HostSlot, DeviceSlot, Ticket | None]]) -> list[Ticket]:
        """Copies to the device, each after the copy that fills its host slot, if that has a ticket.

        They also come after the work that the destinations' streams have been given so far: the caching allocator
        hands out memory that such work may still be using. Returns the ticket of each: backward can begin with the
        first of many while the others are on their way.
        """
        if not moves:
            return []
        _wait_for_work(self._to_device, [destination for _, destination, _ in moves])
        tickets: list[Ticket] = []
        with self._device.on(self._to_device):
            for group in _groups(moves):
                for _, destination, filled in group:
                    # Where the destination's stream has waited for that copy already, so has this one.
                    if filled is not None and destination.stream.stream_id not in filled.held:
                        filled.hold(self._to_device)
                to, of = [slot.tensor for _, slot, _ in group], [slot.tensor for slot, _, _ in group]
                tickets += [self._copy("reload", self._to_device, to, of)] * len(group)
        return tickets

    def reload_into(self, moves: Sequence[tuple[HostSlot, DeviceSlot]], after: Iterable[Ticket]) -> Ticket:
        """Copies to the device, after what the tickets stand for and nothing else.

        It is for memory of which the caller knows who used it last.
        """
        for ticket in after:
            ticket.hold(self._to_device)
        with self._device.on(self._to_device):
            to, of = [slot.tensor for _, slot in moves], [slot.tensor for slot, _ in moves]
            return self._copy("reload", self._to_device, to, of)

    def _copy(self, direction: Direction, stream: Stream, to: list[torch.Tensor], of: list[torch.Tensor]) -> Ticket:
        """Copies to each tensor, in order on `stream`, which is current, that of the same place in `of`."""
        # One call for all costs the host less than a copy_ for each.
        if self.trace is None:
            torch._foreach_copy_(to, of, non_blocking=True)
            return Ticket(stream.record_event(), self._device)
        with self.trace.copying(direction, stream, sum(each.nbytes for each in to), len(to)) as group:
            torch._foreach_copy_(to, of, non_blocking=True)
        return Ticket(group.ended, self._device, self.trace)

    def synchronize(self) -> None:
        """Waits on the host for every copy that was started."""
        self._to_host.synchronize()
        self._to_device.synchronize()


class Ticket:
    """Copies that were started and will have ended when `event` has come to pass.

    held: the numbers of the streams that have been made to wait.
    """

    __slots__ = ("_device", "_trace", "event", "held")

    def __init__(self, event: Event, device: Device, trace: Trace | None = None) -> None:
        self.event = event
        self._device = device
        self._trace = trace
        self.held: set[int] = set()

    def wait(self) -> None:
        """Waits on the host. Raises DeviceFailed where the device has dropped the copies."""
        self._device.wait_for(self.event)

    def hold(self, stream: Stream, why: str | None = None) -> None:
        """Makes what `stream` is given from now on wait for the copies. The host does not wait.

        why: what a trace is to call the wait, if it is one of computation.
        """
        if stream.stream_id not in self.held:
            if self._trace is not None and why is not None:
                self._trace.waits(stream, self.event, why)
            stream.wait_event(self.event)
            self.held.add(stream.stream_id)


# What arrives together is waited for together: an event for each small tensor would cost more than it could save.
_GROUP_BYTES = 4 << 20


def _groups(
    moves: Sequence[tuple[HostSlot, DeviceSlot, Ticket | None]],
) -> Iterator[Sequence[tuple[HostSlot, DeviceSlot, Ticket | None]]]:
    first, nbytes = 0, 0
    for end, (source, _, _) in enumerate(moves, start=1):
        nbytes += source.tensor.nbytes
        if nbytes >= _GROUP_BYTES or end == len(moves):
            yield moves[first:end]
            first, nbytes = end, 0


def _wait_for_work(side: Stream, slots: Iterable[DeviceSlot]) -> None:
    for stream in {slot.stream.stream_id: slot.stream for slot in slots}.values():
        side.wait_event(stream.record_event())

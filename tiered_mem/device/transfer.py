"""Copies between tiers that run beside compute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Literal, Protocol, cast

import torch

from ..ground.wrappers import plain_tensors
from .device import Device, Event, Stream
from .torch_private import profiled


class TransferEngine:
    """Starts copies between device memory and host slots, on one side stream for each direction.

    No call waits for the device. Copies are torch's own, with non_blocking=True, and nothing else: torch_npu queues
    its work on a thread of its own, which a copy issued below torch would overtake. Who starts a copy keeps the
    memory on both sides until the copy has ended, or until a stream that uses it next waits for it.

    of, to: tensors of equal size, type and form, contiguous on both sides; those of the same place belong together.

    stream: one stream for both directions, in place of two of the engine's own.
    trace: is told of the copies, and of who waits for them. It may be exchanged. torch's profilers see them as
    "tiered_mem: offload" and "tiered_mem: reload", where the host issues them.
    """

    def __init__(self, device: Device, stream: Stream | None = None, trace: CopyObserver | None = None) -> None:
        self._device = device
        self.trace = trace
        self._to_host = stream or device.new_stream()
        self._to_device = stream or device.new_stream()

    def offload(self, of: Tensors, to: Tensors, streams: Iterable[Stream]) -> Ticket:
        """Copies to the host, after the work that the streams which make `of` have been given so far.

        One ticket stands for all: what leaves together is released together.
        """
        with self._device.on(self._to_host):
            _wait_for_work(self._to_host, streams)
            return self._copy("offload", self._to_host, to, of)

    def reload(self, of: Tensors, to: Tensors, stream: Stream, filled: Sequence[Ticket | None]) -> list[Ticket]:
        """Copies to the device, each after the copy that fills its host slot, if that has a ticket.

        They also come after the work that `stream`, on which `to` was allocated, has been given so far: the caching
        allocator hands out memory that such work may still be using. Returns the ticket of each: backward can begin
        with the first of many while the others are on their way.
        """
        if not of:
            return []
        tickets: list[Ticket] = []
        with self._device.on(self._to_device):
            _wait_for_work(self._to_device, [stream])
            for group in _groups(of):
                for ticket in dict.fromkeys(filled[group]):
                    # Where the destinations' stream has waited for that copy already, so has this one.
                    if ticket is not None and stream.stream_id not in ticket.held:
                        ticket.hold(self._to_device)
                copied = self._copy("reload", self._to_device, to[group], of[group])
                tickets += [copied] * (group.stop - group.start)
        return tickets

    def reload_into(self, of: Tensors, to: Tensors, after: Iterable[Ticket]) -> Ticket:
        """Copies to the device, after what the tickets stand for and nothing else.

        It is for memory of which the caller knows who used it last.
        """
        with self._device.on(self._to_device):
            for ticket in after:
                ticket.hold(self._to_device)
            return self._copy("reload", self._to_device, to, of)

    def _copy(self, direction: Direction, stream: Stream, to: Tensors, of: Tensors) -> Ticket:
        """Copies to each tensor, in order on `stream`, which is current, that of the same place in `of`."""
        # One call for all costs the host less than a copy_ for each.
        copy = partial(_named_copy, f"tiered_mem: {direction}") if profiled() else torch._foreach_copy_
        if self.trace is None:
            copy(to, of, non_blocking=True)
            return Ticket(stream.record_event(), self._device)
        with self.trace.copying(direction, stream, sum(each.nbytes for each in to), len(to)) as group:
            copy(to, of, non_blocking=True)
        return Ticket(group.ended, self._device, self.trace)

    def may_outlive(self, tensor: torch.Tensor) -> None:
        """Nobody but copies that were started needs the tensor: torch's pool has its memory after them."""
        if self._device.kind != "cpu":
            for part in plain_tensors(tensor):
                for stream in (self._to_host, self._to_device):
                    part.record_stream(cast(torch.Stream, stream))

    def synchronize(self) -> None:
        """Waits on the host for every copy that was started."""
        self._to_host.synchronize()
        self._to_device.synchronize()


class Ticket:
    """Copies that were started and will have ended when `event` has come to pass.

    held: the numbers of the streams that have been made to wait.
    """

    __slots__ = ("_device", "_trace", "event", "held")

    def __init__(self, event: Event, device: Device, trace: CopyObserver | None = None) -> None:
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


class CopyObserver(Protocol):
    """Hears of copies while they are issued, and of streams that wait for them."""

    def copying(
        self, direction: Direction, stream: Stream, nbytes: int, blocks: int
    ) -> AbstractContextManager[CopyGroup]:
        """Copies are issued to `stream` inside. nbytes, blocks: of all together."""

    def waits(self, stream: Stream, ended: Event, why: str) -> None:
        """A stream is about to wait for the end of a copy group."""


class CopyGroup:
    """Copies that are started together. `ended` is set when all have been issued."""

    __slots__ = ("ended",)
    ended: Event


Tensors = list[torch.Tensor]
Direction = Literal["offload", "reload"]

# What arrives together is waited for together: an event for each small tensor would cost more than it could save.
_GROUP_BYTES = 4 << 20


def _named_copy(name: str, to: Tensors, of: Tensors, non_blocking: bool) -> None:
    with torch.profiler.record_function(name):
        torch._foreach_copy_(to, of, non_blocking=non_blocking)


def _groups(tensors: Tensors) -> Iterator[slice]:
    first, nbytes = 0, 0
    for end, tensor in enumerate(tensors, start=1):
        nbytes += tensor.nbytes
        if nbytes >= _GROUP_BYTES or end == len(tensors):
            yield slice(first, end)
            first, nbytes = end, 0


def _wait_for_work(side: Stream, streams: Iterable[Stream]) -> None:
    for stream in {stream.stream_id: stream for stream in streams}.values():
        side.wait_event(stream.record_event())

"""Records what happens when, in the device's own time."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ..device.device import Device, Event, Stream
from ..device.transfer import CopyGroup, Direction
from .figures import Figures, Stall, Total
from .records import (
    Copy,
    FileKind,
    FileMove,
    HostWait,
    Layer,
    Mark,
    Save,
    TraceRecord,
    Wait,
    chrome_trace,
)

_REBASE_SECONDS = 1.0
# Where the device waits for the host, to read a step's times all at once would hold it up.
_READ_AT_ONCE = 4


class Trace:
    """Layers, saves, copies and waits, timed by events on the streams, and the disk tier's reads and writes.

    One thread at a time may call it, except `file_moved`.

    Recording does not wait for the device: an event's time is read after it has passed. `figures` and `export` wait
    for all records. On the cpu a copy has ended when it is issued, so that nothing waits for one.

    limit: the number of records that are kept for `export`, and of records of files; the oldest go first. `figures`
        counts all that were ever made. Raises ValueError below 1.
    now: the host's clock, in seconds.
    pending: the number of records besides that the device may be behind. Where it is farther behind, recording
        waits for it, and raises DeviceFailed where it has failed. Raises ValueError below 1.
    aligned: what the host and the files do is on the device's axis of time, for which the host waits once for it.
    observers: called with each record once its time is known, in their order, but with those of host and files.
    """

    def __init__(
        self,
        device: Device,
        *,
        now: Callable[[], float] = time.perf_counter,
        limit: int = 100_000,
        pending: int = 10_000,
        aligned: bool = True,
    ) -> None:
        if min(limit, pending) < 1:
            raise ValueError(f"a trace must keep at least 1 record, not {min(limit, pending)}")
        self._device = device
        self._most_pending = pending
        self._pending: deque[_Pending] = deque()
        self._under_way: dict[Event, Copy] = {}  # the copies among them, by their end
        self._records: deque[TraceRecord] = deque(maxlen=limit)
        self._timed = 0  # how many of them there ever were
        self._layer: tuple[int | None, bool] = (None, False)
        self._graph = 0
        self._copied: dict[Direction, Total] = {"offload": Total(), "reload": Total()}
        self._stalls: dict[tuple[str, int | None, bool], float] = defaultdict(float)
        self._host_waited = Total()
        self._files_lock = threading.Lock()
        self._files: deque[FileMove] = deque(maxlen=limit)
        self._moved: dict[FileKind, Total] = {"write": Total(), "read": Total()}
        self.observers: list[Callable[[TraceRecord], None]] = []
        event = device.timed_event(device.current_stream())
        if aligned:
            event.synchronize()
        self._now = now
        self._host_base = now()
        self._base = _Base(event, 0.0)

    # What the manager tells.

    def layer_begins(self, graph: int, layer: int, *, backward: bool = False) -> None:
        """A layer begins on the caller's current stream. A layer that was still going on there has ended."""
        self._layer = (layer, backward)
        self._graph = graph
        stream = self._device.current_stream()
        self._add(Layer(stream.stream_id, graph, layer, backward, begins=True), stream)

    def layer_ends(self, graph: int, layer: int, *, backward: bool = False) -> None:
        stream = self._device.current_stream()
        self._add(Layer(stream.stream_id, graph, layer, backward, begins=False), stream)

    def backward_ends(self) -> None:
        """The layer whose backward began last was the last of this backward."""
        layer, backward = self._layer
        if layer is not None and backward:
            self.layer_ends(self._graph, layer, backward=True)

    def mark(self, of: object) -> None:
        """The program is at a place of which an observer wants to know the time. It is not kept."""
        stream = self._device.current_stream()
        self._add(Mark(stream.stream_id, of), stream)

    def saved(self, graph: int, layer: int, nbytes: int) -> None:
        """A block of that size was taken over from a layer."""
        stream = self._device.current_stream()
        self._add(Save(stream.stream_id, graph, layer, nbytes), stream)

    @contextmanager
    def copying(self, direction: Direction, stream: Stream, nbytes: int, blocks: int) -> Iterator[CopyGroup]:
        """Copies are issued to `stream` inside. The stream must wait for what they need before that.

        nbytes, blocks: of all copies together. Nothing is recorded where an exception comes out.
        """
        group = CopyGroup()
        self._make_room()  # now: an error must not come between the copies and their end
        base, begun = self._base, self._device.timed_event(stream)
        yield group
        group.ended = self._device.timed_event(stream)
        copy = self._under_way[group.ended] = Copy(direction, nbytes, blocks)
        self._put(_Pending(copy, base, (begun, group.ended)))

    def waits(self, stream: Stream, ended: Event, why: str) -> None:
        """Call it right before a compute stream is made to wait for the end of a copy group.

        The wait belongs to the layer that began last. Events that are no group's end are ignored.
        """
        copy = self._under_way.get(ended)
        if copy is not None:
            self._add(Wait(stream.stream_id, copy, why, *self._layer), stream)

    @contextmanager
    def host_waits(self) -> Iterator[None]:
        """The host waits for room inside."""
        began = self._now() - self._host_base
        try:
            yield
        finally:
            self._keep(HostWait(), (began, self._now() - self._host_base))

    def file_moved(self, kind: FileKind, nbytes: int, began: float, ended: float) -> None:
        """A file was read or written. Any thread may call it. began, ended: seconds of the host's clock."""
        record = FileMove(kind, nbytes)
        record.times = (began - self._host_base, ended - self._host_base)
        with self._files_lock:
            self._files.append(record)
            self._moved[kind].add(record.seconds, nbytes)

    # What it tells.

    def figures(self) -> Figures:
        self._wait_until_pending(0)
        stalls = (Stall(*key, seconds) for key, seconds in self._stalls.items())
        with self._files_lock:
            return Figures(
                offload=replace(self._copied["offload"]),
                reload=replace(self._copied["reload"]),
                stalls=tuple(sorted(stalls, key=lambda stall: stall.seconds, reverse=True)),
                host_waits=replace(self._host_waited),
                writes=replace(self._moved["write"]),
                reads=replace(self._moved["read"]),
            )

    def export(self, path: str | os.PathLike[str]) -> None:
        """Writes a JSON file in Chrome's trace event format, which Perfetto opens."""
        self._wait_until_pending(0)
        with self._files_lock:
            records = [*self._records, *self._files]
            made = self._timed + sum(total.count for total in self._moved.values())
        dropped = made - len(records)
        Path(path).write_text(json.dumps(chrome_trace(str(self._device.torch_device), records, dropped)))

    # Events become times in the order in which they were recorded.

    def poll(self, *, wait: bool = False) -> None:
        """Looks which of the first few records have a time by now.

        wait: until all have, or DeviceFailed is raised.
        """
        if wait:
            self._wait_until_pending(0)
        for _ in range(_READ_AT_ONCE):
            if not self._pending or not self._pending[0].events[-1].query():
                return
            self._time_first()

    def _add(self, record: TraceRecord, stream: Stream) -> None:
        self._make_room()
        self._put(_Pending(record, self._base, (self._device.timed_event(stream),)))

    def _put(self, pending: _Pending) -> None:
        self._pending.append(pending)
        self.poll()

    def _make_room(self) -> None:
        self._wait_until_pending(self._most_pending - 1)

    def _wait_until_pending(self, most: int) -> None:
        while len(self._pending) > most:
            last = self._pending[0].events[-1]
            if not last.query():  # a wait costs the host much more than a look
                self._device.wait_for(last)
            self._time_first()
            while len(self._pending) > most and self._pending[0].events[-1].query():  # which costs less
                self._time_first()

    def _time_first(self) -> None:
        record, base, events = self._pending.popleft()
        self._under_way.pop(events[-1], None)
        times = tuple(base.at + self._device.elapsed(base.event, event) for event in events)
        # Devices tell times as 32-bit floats. A base is in the past of whatever is recorded after it was chosen.
        if times[-1] - self._base.at > _REBASE_SECONDS:
            self._base = _Base(events[-1], times[-1])
        self._keep(record, times)

    def _keep(self, record: TraceRecord, times: tuple[float, ...]) -> None:
        record.times = times
        for observe in self.observers:
            observe(record)
        if isinstance(record, Mark):
            return
        self._records.append(record)
        self._timed += 1
        match record:
            case Copy():
                self._copied[record.direction].add(record.seconds, record.nbytes, record.blocks)
            case Wait() if record.stall > 0:
                self._copied[record.copy.direction].stalled += record.stall
                self._stalls[record.why, record.layer, record.backward] += record.stall
            case HostWait():
                self._host_waited.add(record.seconds)


class _Base(NamedTuple):
    """An event that passed `at` seconds after the trace began."""

    event: Event
    at: float


class _Pending(NamedTuple):
    """A record whose events may not have passed yet, and the base of their times."""

    record: TraceRecord
    base: _Base
    events: tuple[Event, ...]

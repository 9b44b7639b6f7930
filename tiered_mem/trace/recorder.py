"""Records what happens when, in the device's own time: for charts, for sums, and for the measure of a step."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import fsum
from typing import Any, NamedTuple

from ..device.device import Device, Event, Stream
from ..device.transfer import CopyGroup, Direction, TransferEngine
from ..policies.base import StepMeasured
from ..sizes import format_bytes, format_seconds
from .rates import CopySpan, rates
from .records import (
    Copy,
    FileKind,
    FileMove,
    HostWait,
    Layer,
    Levels,
    Mark,
    Save,
    TraceRecord,
    Wait,
    chrome_trace,
    layer_name,
)

_REBASE_SECONDS = 1.0
# Where the device waits for the host, to read a step's times all at once would hold it up.
_READ_AT_ONCE = 4
_MOST_PENDING = 1_000_000  # nobody waits for a measurement


class Trace:
    """Layers, saves, copies and waits, timed by events on the streams, and the disk tier's reads and writes.

    One thread at a time may call it, except `file_moved`.

    Recording does not wait for the device: an event's time is read after it has passed. `figures` and `chart` wait
    for all records. On the cpu a copy has ended when it is issued, so that nothing waits for one.

    limit: the number of records that are kept for `chart`, and of records of files; the oldest go first. `figures`
        counts all that were ever made. Raises ValueError below 1.
    now: the host's clock, in seconds.
    pending: the number of records besides that the device may be behind. Where it is farther behind, recording
        waits for it, and raises DeviceFailed where it has failed. Raises ValueError below 1.
    aligned: what the host and the files do is on the device's axis of time, for which the host waits once for it.
    levels: tells the bytes in the tiers now, in a record without times. It is asked where layers begin and end,
        where compute comes to a wait, and between backward and the next layer at each copy.
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
        levels: Callable[[], Levels] | None = None,
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
        self._levels = levels
        self._compute = device.current_stream()  # that of the last layer
        self._between = True  # no layer runs, nor a backward
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
        self._between = False
        self._compute = stream = self._device.current_stream()
        self._add(Layer(stream.stream_id, graph, layer, backward, begins=True), stream, level=True)

    def layer_ends(self, graph: int, layer: int, *, backward: bool = False) -> None:
        stream = self._device.current_stream()
        self._add(Layer(stream.stream_id, graph, layer, backward, begins=False), stream, level=True)

    def backward_ends(self) -> None:
        """The layer whose backward began last was the last of this backward."""
        layer, backward = self._layer
        if layer is not None and backward:
            self.layer_ends(self._graph, layer, backward=True)
            self._between = True

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
        if self._between:
            self._level(base, self._device.timed_event(self._compute))

    def waits(self, stream: Stream, ended: Event, why: str) -> None:
        """Call it right before a compute stream is made to wait for the end of a copy group.

        The wait belongs to the layer that began last. Events that are no group's end are ignored.
        """
        copy = self._under_way.get(ended)
        if copy is not None:
            self._add(Wait(stream.stream_id, copy, why, *self._layer), stream, level=True)

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

    def chart(self, about: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """A JSON object in Chrome's trace event format, which Perfetto opens. about: more to say in it."""
        self._wait_until_pending(0)
        with self._files_lock:
            records = [*self._records, *self._files]
            made = self._timed + sum(total.count for total in self._moved.values())
        return chrome_trace(str(self._device.torch_device), records, made - len(records), about)

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

    def _add(self, record: TraceRecord, stream: Stream, *, level: bool = False) -> None:
        self._make_room()
        base, event = self._base, self._device.timed_event(stream)
        self._put(_Pending(record, base, (event,)))
        if level:
            self._level(base, event)

    def _level(self, base: _Base, event: Event) -> None:
        """What is in the tiers now is there where the event comes to pass."""
        if self._levels is not None:
            self._put(_Pending(self._levels(), base, (event,)))

    def _put(self, pending: _Pending) -> None:
        self._pending.append(pending)
        self.poll()

    def _make_room(self) -> None:
        """For a record and the levels with it."""
        self._wait_until_pending(max(0, self._most_pending - 2))

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


@dataclass(frozen=True, slots=True)
class Figures:
    """All since the trace began. stalls: the longest first. host_waits: of the host itself, for room."""

    offload: Total
    reload: Total
    stalls: tuple[Stall, ...]
    host_waits: Total
    writes: Total
    reads: Total


@dataclass(slots=True)
class Total:
    """Copies, files or waits of one kind, and their seconds together, some of which ran side by side.

    blocks, stalled: of copies, how many blocks they moved, and how many seconds compute streams waited for them.
    """

    count: int = 0
    seconds: float = 0.0
    nbytes: int = 0
    blocks: int = 0
    stalled: float = 0.0

    def add(self, seconds: float, nbytes: int = 0, blocks: int = 0) -> None:
        self.count += 1
        self.seconds += seconds
        self.nbytes += nbytes
        self.blocks += blocks

    @property
    def hidden(self) -> float | None:
        """The share of the copying that nobody waited for, from 0 to 1; None where there was none."""
        return min(1.0, max(0.0, 1 - self.stalled / self.seconds)) if self.seconds > 0 else None


@dataclass(frozen=True, slots=True)
class Stall:
    """How many seconds compute streams waited for copies in a layer; None is before the first one."""

    why: str
    layer: int | None
    backward: bool
    seconds: float


def summary_rows(figures: Figures) -> list[tuple[str, str]]:
    """The figures for people, as labels and values."""
    stalls = [
        f"{format_seconds(s.seconds)} {s.why} in {layer_name(s.layer, s.backward)}" for s in figures.stalls[:3]
    ]
    waited = format_seconds(sum(stall.seconds for stall in figures.stalls))
    rows = [
        ("offload copies", _told(figures.offload)),
        ("reload copies", _told(figures.reload)),
        ("compute waited for them", f"{waited}: {', '.join(stalls)}" if stalls else "never"),
        ("host waited for room", format_seconds(figures.host_waits.seconds)),
    ]
    files = (("files written", figures.writes), ("files read", figures.reads))
    return rows + [(name, _rate(each)) for name, each in files if each.count]


def _rate(files: Total) -> str:
    each = f"{files.nbytes / files.seconds / 1e9:.2f} GB/s each" if files.seconds > 0 else "in no time"
    return f"{files.count}, {format_bytes(files.nbytes)}, {each}"


def _told(copies: Total) -> str:
    if copies.hidden is None:
        return "none"
    moved = f"{format_bytes(copies.nbytes)} in {copies.count} groups"
    return f"{moved}, {format_seconds(copies.seconds)}, {100 * copies.hidden:.0f} % hidden"


class StepMeter:
    """Measures steps that are marked position by position.

    trace: the one that the engine has for good. Without one, it has one while a step is measured.
    ended: the steps that are over and were not told.
    """

    def __init__(self, device: Device, engine: TransferEngine, trace: Trace | None) -> None:
        self._device = device
        self._engine = engine
        self._trace = trace
        self._now: _Times | None = None
        self.ended: deque[_Times] = deque()

    def begin(self, step: int) -> None:
        """The step is to be measured from its next position on, if it is not measured already."""
        if self._now is not None:
            return
        trace = self._trace or Trace(self._device, limit=1, pending=_MOST_PENDING, aligned=False)
        self._engine.trace = trace
        self._now = _Times(step, trace)

    def position(self) -> None:
        """The step that is measured, if one is, has come to its next position."""
        if self._now is not None:
            self._now.position()

    def end(self) -> None:
        """The step is over."""
        times, self._now = self._now, None
        if times is not None:
            times.position()
            times.over = True
            self.ended.append(times)
            self._engine.trace = self._trace

    def measured(self, *, wait: bool = False) -> StepMeasured | None:
        """The oldest step that has been measured and not been told.

        wait: until the device is through with it. Raises DeviceFailed then.
        """
        if self.ended:
            self.ended[0].trace.poll(wait=wait)
            if self.ended[0].complete:
                return self.ended.popleft().told()
        return None


class _Times:
    """One step: its positions, the last of which is its end, and what there was between them."""

    def __init__(self, step: int, trace: Trace) -> None:
        self.trace = trace
        self.over = False
        self._step = step
        self._positions = 0
        self._at: list[float] = []
        self._stalls: list[float] = []
        self._states = 0.0
        self._copies: dict[Direction, list[CopySpan]] = {"offload": [], "reload": []}
        trace.observers.append(self._see)

    def position(self) -> None:
        self._positions += 1
        self.trace.mark(self)

    @property
    def complete(self) -> bool:
        return len(self._at) == self._positions

    def told(self) -> StepMeasured:
        self.trace.observers.remove(self._see)
        compute = [
            max(0.0, end - begin - stall)
            for begin, end, stall in zip(self._at, self._at[1:], self._stalls, strict=False)
        ]
        out, back, both = rates(*self._copies.values())
        stalls, waits = fsum(self._stalls), self._stalls[: len(compute)]
        return StepMeasured(self._step, compute, stalls, out, back, waits, self._states, both)

    def _see(self, record: TraceRecord) -> None:
        if isinstance(record, Mark) and record.of is self:
            self._at.append(record.times[0])
            self._stalls.append(0.0)
        if not self._at or (self.over and self.complete):
            return  # a trace of the user's goes on
        match record:
            case Wait():
                self._stalls[-1] += record.stall
                self._states += record.stall if record.why == "states" else 0.0
            case Copy(direction, nbytes):
                self._copies[direction].append(CopySpan(record.times[0], record.times[-1], nbytes))

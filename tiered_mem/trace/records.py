"""The records of a trace, and their form in Chrome's trace event format."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # who reads a file needs no torch
    from ..device.transfer import Direction

FileKind = Literal["write", "read"]

# The version of what a file has for pictures. Files without one are from before there were levels.
SCHEMA = 2
# The tracks by their names. A second one of a kind has a comma after it, and what makes it another.
LAYERS, WAITS, HOST_WAITS = "compute: layers", "compute: waits", "host: waits"
COPIES: dict[Direction, str] = {"offload": "copies: offload", "reload": "copies: reload"}
FILES: dict[FileKind, str] = {"write": "disk: writes", "read": "disk: reads"}
# The counters of the bytes in each tier.
LEVELS = {"device": "device bytes", "host": "host bytes", "disk": "disk bytes"}

_PROCESS = 1
_TRACKS = (LAYERS, WAITS, *COPIES.values(), HOST_WAITS)


@dataclass(slots=True, eq=False)
class TraceRecord:
    """times: in seconds since the trace began: the first moment and the last, or the only one."""

    times: tuple[float, ...] = field(default=(), init=False)

    @property
    def seconds(self) -> float:
        return self.times[-1] - self.times[0]


@dataclass(slots=True, eq=False)
class Layer(TraceRecord):
    """A layer begins or ends on a compute stream."""

    stream: int
    graph: int
    layer: int
    backward: bool
    begins: bool


@dataclass(slots=True, eq=False)
class Save(TraceRecord):
    stream: int
    graph: int
    layer: int
    nbytes: int


@dataclass(slots=True, eq=False)
class Levels(TraceRecord):
    """The bytes in the tiers where a compute stream comes to; None where nobody counts them."""

    device: int | None
    host: int | None
    disk: int | None


@dataclass(slots=True, eq=False)
class Mark(TraceRecord):
    """A place in the program that is in no chart. of: whoever wants to know when that was."""

    stream: int
    of: object


@dataclass(slots=True, eq=False)
class Copy(TraceRecord):
    """A group of copies, from when the first may begin to when the last has ended."""

    direction: Direction
    nbytes: int
    blocks: int


@dataclass(slots=True, eq=False)
class Wait(TraceRecord):
    """A compute stream comes to where it waits for a copy, in a layer, or before the first one."""

    stream: int
    copy: Copy
    why: str
    layer: int | None
    backward: bool

    @property
    def stall(self) -> float:
        """The seconds that the stream really waits."""
        return max(0.0, self.copy.times[-1] - self.times[0])


@dataclass(slots=True, eq=False)
class HostWait(TraceRecord):
    """The host waits for room."""


@dataclass(slots=True, eq=False)
class FileMove(TraceRecord):
    """A thread of the disk tier writes a file, or reads one."""

    kind: FileKind
    nbytes: int


def layer_name(layer: int | None, backward: bool) -> str:
    return "no layer" if layer is None else f"{'backward' if backward else 'forward'} {layer}"


def chrome_trace(
    process: str, records: Iterable[TraceRecord], dropped: int = 0, about: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A JSON object for Perfetto. The records of each stream are in its order; those of files are in any.

    dropped: the number of older records. A span needs all of its records, so that the first one may be missing.
    about: what else the file is to say under "otherData".
    The counter "saved bytes" shows the bytes of layers whose backward has not begun.
    """
    chart = _Chart(process)
    for record in records:
        chart.draw(record)
    chart.finish()
    other = {"schema": SCHEMA, "older records left out": dropped, **(about or {})}
    return {"displayTimeUnit": "ms", "otherData": other, "traceEvents": chart.events}


class _Chart:
    """Each track shows one thing after the other. A second compute stream has tracks of its own.

    So have files that are read or written at the same time as others.
    """

    def __init__(self, process: str) -> None:
        self.events: list[dict[str, Any]] = []
        self._tids: dict[str, int] = {}
        self._first_stream: int | None = None
        self._ends: dict[int, float] = defaultdict(float)
        self._open: dict[int, Layer] = {}
        self._unread: dict[tuple[int, int], int] = defaultdict(int)
        self._files: list[FileMove] = []
        self._levels: dict[str, int] = {}
        self._latest = 0.0
        self._name("process_name", process, 0)
        for track in _TRACKS:
            self._tid(track)

    def draw(self, record: TraceRecord) -> None:
        if not isinstance(record, (HostWait, FileMove)):
            self._latest = max(self._latest, record.times[-1])
        match record:
            case Layer():
                self._layer(record)
            case Save():
                self._save(record)
            case Copy():
                args = {**_bytes_of(record), "blocks": record.blocks}
                self._span(self._tid(COPIES[record.direction]), record.direction, *record.times, **args)
            case Wait() if record.stall > 0:
                tid = self._tid_of(WAITS, record.stream)
                name = layer_name(record.layer, record.backward)
                self._span(tid, record.why, record.times[0], record.copy.times[-1], layer=name)
            case HostWait():
                self._span(self._tid(HOST_WAITS), "host waits", *record.times)
            case FileMove():
                self._files.append(record)
            case Levels():
                self._count_levels(record)

    def finish(self) -> None:
        for tid in list(self._open):
            self._close(tid, self._latest)
        for record in sorted(self._files, key=lambda record: record.times):
            tid = self._free_tid(FILES[record.kind], record.times[0])
            self._span(tid, record.kind, *record.times, **_bytes_of(record))

    def _free_tid(self, track: str, now: float) -> int:
        """The number of the first free track of this kind."""
        names = (track if number == 1 else f"{track}, {number}" for number in itertools.count(1))
        return next(tid for tid in map(self._tid, names) if self._ends[tid] <= _microseconds(now))

    def _layer(self, record: Layer) -> None:
        now, tid = record.times[0], self._tid_of(LAYERS, record.stream)
        if record.begins:
            self._close(tid, now)
            self._open[tid] = record
            if record.backward and self._unread.pop((record.graph, record.layer), 0):
                self._count_saved(now)
            return
        begun = self._open.get(tid)
        if begun and (begun.graph, begun.layer, begun.backward) == (record.graph, record.layer, record.backward):
            self._close(tid, now)

    def _close(self, tid: int, now: float) -> None:
        begun = self._open.pop(tid, None)
        if begun is not None:
            self._span(tid, layer_name(begun.layer, begun.backward), begun.times[0], now, graph=begun.graph)

    def _save(self, record: Save) -> None:
        now, tid = record.times[0], self._tid_of(LAYERS, record.stream)
        args = {"graph": record.graph, "layer": record.layer, "bytes": record.nbytes}
        self._event(ph="i", s="t", name="saved", ts=_microseconds(now), tid=tid, args=args)
        self._unread[record.graph, record.layer] += record.nbytes
        self._count_saved(now)

    def _count_saved(self, now: float) -> None:
        saved = {"bytes": sum(self._unread.values())}
        self._event(ph="C", name="saved bytes", ts=_microseconds(now), tid=0, args=saved)

    def _count_levels(self, record: Levels) -> None:
        """Of each tier whose level is another than before."""
        for tier, counter in LEVELS.items():
            nbytes = getattr(record, tier)
            if nbytes is not None and self._levels.get(tier) != nbytes:
                self._levels[tier] = nbytes
                ts = _microseconds(record.times[0])
                self._event(ph="C", name=counter, ts=ts, tid=0, args={"bytes": nbytes})

    def _span(self, tid: int, name: str, began: float, ended: float, **args: Any) -> None:
        # Devices round their times; spans that overlap by that little are dropped by viewers.
        began = max(_microseconds(began), self._ends[tid])
        self._ends[tid] = max(_microseconds(ended), began)
        duration = round(self._ends[tid] - began, 3)
        self._event(ph="X", name=name, ts=began, dur=duration, tid=tid, args=args)

    def _tid_of(self, track: str, stream: int) -> int:
        if self._first_stream is None:
            self._first_stream = stream
        return self._tid(track if stream == self._first_stream else f"{track}, stream {stream}")

    def _tid(self, track: str) -> int:
        if track not in self._tids:
            self._tids[track] = len(self._tids) + 1
            self._name("thread_name", track, self._tids[track])
        return self._tids[track]

    def _name(self, kind: str, name: str, tid: int) -> None:
        self._event(ph="M", name=kind, tid=tid, args={"name": name})

    def _event(self, **event: Any) -> None:
        self.events.append({"pid": _PROCESS, **event})


def _bytes_of(record: Copy | FileMove) -> dict[str, Any]:
    args: dict[str, Any] = {"bytes": record.nbytes}
    if record.seconds > 0:
        args["GB/s"] = round(record.nbytes / record.seconds / 1e9, 3)
    return args


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)

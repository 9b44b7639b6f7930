"""A trace with two streams and copies for it to record, and how what it exports is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tiered_mem.device.device import Device, Event, Stream
from tiered_mem.device.transfer import Direction
from tiered_mem.trace.recorder import Figures, Trace
from tiered_mem.trace.records import Levels

MIB = 1 << 20
SLOW = "40MB/s"
SLOW_BYTES_PER_S = 40e6

Events = list[dict[str, Any]]


class Scene:
    """A trace, the compute stream and a side stream, and the copies on both."""

    def __init__(
        self, kind: str, limit: int = 1000, pending: int = 1000, levels: Callable[[], Levels] | None = None
    ) -> None:
        self.device = Device(kind)
        self.trace = Trace(self.device, limit=limit, pending=pending, levels=levels)
        self.side = self.device.new_stream()
        self.compute = self.device.current_stream()
        self._buffers: list[torch.Tensor] = []

    def copy(self, direction: Direction = "offload", nbytes: int = MIB) -> Event:
        """The end of a copy on the side stream. What it needs is there when it is issued."""
        source, destination = self.pair(direction, nbytes)
        with self.trace.copying(direction, self.side, nbytes, 1) as group, self.device.on(self.side):
            destination.copy_(source, non_blocking=True)
        return group.ended

    def work(self, nbytes: int) -> None:
        """Keeps the compute stream busy: it is a copy to the device, as long as the link makes it."""
        self.prepare_work(nbytes)()

    def prepare_work(self, nbytes: int) -> Callable[[], object]:
        source, destination = self.pair("reload", nbytes)
        return lambda: destination.copy_(source, non_blocking=True)

    def wait(self, ended: Event, why: str = "release", stream: Stream | None = None) -> None:
        stream = stream or self.compute
        self.trace.waits(stream, ended, why)
        stream.wait_event(ended)

    def figures(self) -> Figures:
        self.compute.synchronize()
        return self.trace.figures()

    def events(self, path: Path) -> Events:
        """What the trace exports."""
        self.compute.synchronize()
        path.write_text(json.dumps(self.trace.chart()))
        return events_in(path)

    def finish(self) -> None:
        for stream in (self.compute, self.side):
            stream.synchronize()
        self._buffers.clear()

    def pair(self, direction: Direction, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What to copy from, and what to copy to."""
        on_device = torch.zeros(nbytes, dtype=torch.uint8, device=self.device.torch_device)
        on_host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=self.device.kind != "cpu")
        self.device.timed_event(self.compute).synchronize()
        self._buffers += [on_device, on_host]
        return (on_device, on_host) if direction == "offload" else (on_host, on_device)


def events_in(path: Path) -> Events:
    """What a trace exported. Checked for what a viewer needs."""
    events: Events = json.loads(path.read_text())["traceEvents"]
    check(events)
    return events


def check(events: Events) -> None:
    tracks = {event["tid"] for event in events if event["ph"] == "M" and event["name"] == "thread_name"}
    ends = dict.fromkeys(tracks, 0.0)
    for event in events:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
        if event["ph"] == "M":
            assert isinstance(event["args"]["name"], str)
            continue
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert event["ts"] >= ends[event["tid"]] - 1e-3, "spans of a track overlap"
            ends[event["tid"]] = event["ts"] + event["dur"]
        elif event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
        else:
            assert (event["ph"], event["s"]) == ("i", "t")
            assert event["tid"] in tracks


def on_track(events: Events, track: str, kind: str = "X") -> Events:
    names = {e["args"]["name"]: e["tid"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    return [event for event in events if event["ph"] == kind and event["tid"] == names[track]]


def end(span: dict[str, Any]) -> float:
    return float(span["ts"] + span["dur"])

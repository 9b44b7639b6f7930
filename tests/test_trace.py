"""A trace tells how long copies took, who waited for them, and when. The link makes the durations."""

from __future__ import annotations

import contextlib
import json
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Link
from tiered_mem.device import Device, Event, Stream
from tiered_mem.timeline import Direction
from tiered_mem.trace import Copies, Figures, Stall, Trace, summary_rows

MIB = 1 << 20
SLOW = "40MB/s"
SLOW_BYTES_PER_S = 40e6

Events = list[dict[str, Any]]


class Scene:
    """A trace, the compute stream and a side stream, and the copies on both."""

    def __init__(self, kind: str, limit: int = 1000) -> None:
        self.device = Device(kind)
        self.trace = Trace(self.device, limit=limit)
        self.side = self.device.new_stream()
        self.compute = self.device.current_stream()
        self._buffers: list[torch.Tensor] = []

    def copy(self, direction: Direction = "offload", nbytes: int = MIB) -> Event:
        """The end of a copy on the side stream. What it needs is there when it is issued."""
        source, destination = self._pair(direction, nbytes)
        with self.trace.copying(direction, self.side, nbytes, 1) as group, self.device.on(self.side):
            destination.copy_(source, non_blocking=True)
        return group.ended

    def work(self, nbytes: int) -> None:
        """Keeps the compute stream busy: it is a copy to the device, as long as the link makes it."""
        self.prepare_work(nbytes)()

    def prepare_work(self, nbytes: int) -> Callable[[], object]:
        source, destination = self._pair("reload", nbytes)
        return lambda: destination.copy_(source, non_blocking=True)

    def wait(self, ended: Event, why: str = "release", stream: Stream | None = None) -> None:
        stream = stream or self.compute
        self.trace.waits(stream, ended, why)
        stream.wait_event(ended)

    def figures(self) -> Figures:
        self.compute.synchronize()
        return self.trace.figures()

    def events(self, path: Path) -> Events:
        """What the trace exports. Checked for what a viewer needs."""
        self.compute.synchronize()
        self.trace.export(path)
        events: Events = json.loads(path.read_text())["traceEvents"]
        check(events)
        return events

    def finish(self) -> None:
        for stream in (self.compute, self.side):
            stream.synchronize()
        self._buffers.clear()

    def _pair(self, direction: Direction, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        on_device = torch.zeros(nbytes, dtype=torch.uint8, device=self.device.torch_device)
        on_host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=self.device.kind != "cpu")
        self.device.timed_event(self.compute).synchronize()
        self._buffers += [on_device, on_host]
        return (on_device, on_host) if direction == "offload" else (on_host, on_device)


@pytest.fixture
def scene(device: str) -> Iterator[Scene]:
    scene = Scene(device)
    yield scene
    scene.finish()


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


@pytest.mark.parametrize("direction", ["offload", "reload"])
def test_a_copy_group_takes_as_long_as_the_link_needs(scene: Scene, link: Link, direction: Direction) -> None:
    link(SLOW)
    began = time.perf_counter()
    for nbytes in (4 * MIB, 2 * MIB):
        scene.copy(direction, nbytes)
    figures = scene.figures()
    passed = time.perf_counter() - began
    copies, others = figures.offload, figures.reload
    if direction == "reload":
        copies, others = others, copies
    assert (copies.nbytes, copies.blocks, copies.groups) == (6 * MIB, 2, 2)
    assert 0.99 * copies.nbytes / SLOW_BYTES_PER_S <= copies.seconds <= passed
    assert others == Copies(0, 0, 0, 0.0, 0.0)
    assert others.hidden is None


@pytest.mark.schedules("eager", "late", why="its copies run when they like")
@pytest.mark.parametrize("direction", ["offload", "reload"])
def test_a_wait_that_follows_its_copy_at_once_hides_nothing(scene: Scene, link: Link, direction: Direction) -> None:
    link(SLOW)
    scene.trace.layer_begins(0, 5, backward=True)
    scene.wait(scene.copy(direction, 16 * MIB), "reload")
    figures = scene.figures()
    copies = figures.offload if direction == "offload" else figures.reload
    assert 0.5 * copies.seconds < copies.stalled
    assert copies.hidden is not None
    assert copies.hidden < 0.5
    assert figures.stalls == (Stall("reload", 5, True, copies.stalled),)


@pytest.mark.schedules("eager", why="elsewhere the stream's work and its copy do not run beside each other")
def test_a_wait_for_a_copy_under_way_is_a_stall_of_what_remains(scene: Scene, link: Link) -> None:
    work = scene.prepare_work(4 * MIB)
    link(SLOW)
    ended = scene.copy("offload", 16 * MIB)
    work()
    before = scene.device.timed_event(scene.compute)
    scene.trace.waits(scene.compute, ended, "release")
    after = scene.device.timed_event(scene.compute)
    scene.compute.wait_event(ended)
    copies = scene.figures().offload
    most, least = (scene.device.elapsed(event, ended) for event in (before, after))
    assert 0 < least < copies.seconds, "the stream did not come to the wait while the copy was under way"
    assert least - 1e-6 <= copies.stalled <= most + 1e-6
    assert copies.hidden == 1 - copies.stalled / copies.seconds


def test_a_copy_that_ends_before_compute_comes_to_the_wait_is_hidden(
    scene: Scene, link: Link, tmp_path: Path
) -> None:
    link(SLOW)
    ended = scene.copy(nbytes=4 * MIB)
    scene.compute.wait_event(ended)  # stands for work that takes longer
    scene.wait(ended)
    figures = scene.figures()
    assert figures.offload.hidden == 1
    assert figures.stalls == ()
    assert on_track(scene.events(tmp_path / "trace.json"), "compute: waits") == []


@pytest.mark.parametrize("known", [False, True], ids=["not seen to have ended", "seen to have ended"])
def test_a_wait_for_a_copy_that_has_ended_is_none(scene: Scene, known: bool) -> None:
    ended = scene.copy()
    ended.synchronize()
    if known:
        scene.figures()
    scene.wait(ended)
    figures = scene.figures()
    assert figures.offload.hidden == 1
    assert figures.stalls == ()


@pytest.mark.schedules("eager", "late", why="its copies run when they like")
def test_a_second_wait_for_the_same_copy_adds_nothing(scene: Scene, link: Link) -> None:
    link(SLOW)
    ended = scene.copy(nbytes=16 * MIB)
    scene.wait(ended, "first")
    scene.wait(ended, "second")
    assert [stall.why for stall in scene.figures().stalls] == ["first"]


@pytest.mark.schedules("eager", "late", why="its copies run when they like")
def test_stalls_belong_to_the_layer_that_began_last_and_the_longest_comes_first(scene: Scene, link: Link) -> None:
    link(SLOW)
    scene.wait(scene.copy(nbytes=12 * MIB))
    scene.trace.layer_begins(0, 1)
    for _ in range(2):
        scene.wait(scene.copy(nbytes=12 * MIB))
    scene.trace.layer_ends(0, 1)
    scene.trace.layer_begins(1, 2, backward=True)
    scene.wait(scene.copy("reload", 12 * MIB), "reload")
    figures = scene.figures()
    assert figures.offload.groups == 3
    seconds = {(stall.why, stall.layer, stall.backward): stall.seconds for stall in figures.stalls}
    assert seconds.keys() == {("release", 1, False), ("reload", 2, True), ("release", None, False)}
    assert list(seconds.values()) == sorted(seconds.values(), reverse=True)
    assert figures.reload.stalled == seconds["reload", 2, True]
    assert figures.offload.stalled == pytest.approx(seconds["release", 1, False] + seconds["release", None, False])


def test_waits_for_unknown_events_are_passed_over(scene: Scene) -> None:
    scene.wait(scene.side.record_event())
    assert scene.figures().stalls == ()


def test_a_group_that_an_exception_ends_is_not_recorded(scene: Scene) -> None:
    with pytest.raises(KeyboardInterrupt), scene.trace.copying("offload", scene.side, MIB, 1):
        raise KeyboardInterrupt
    assert scene.figures().offload.groups == 0


@pytest.mark.schedules("eager", "late", why="its copies run when they like")
def test_recording_does_not_wait_for_the_device(scene: Scene, link: Link) -> None:
    link(SLOW)
    ended = scene.copy(nbytes=16 * MIB)
    scene.trace.layer_begins(0, 0)
    scene.trace.saved(0, 0, MIB)
    scene.wait(ended)
    scene.trace.layer_ends(0, 0)
    assert not ended.query()


@pytest.mark.schedules("eager", "late", why="its copies run when they like")
def test_waits_of_the_host_are_on_the_same_time_axis(scene: Scene, link: Link, tmp_path: Path) -> None:
    link(SLOW)
    scene.work(16 * MIB)
    scene.trace = Trace(scene.device)
    ended = scene.copy(nbytes=16 * MIB)
    with contextlib.suppress(KeyboardInterrupt), scene.trace.host_waits():
        ended.synchronize()
        raise KeyboardInterrupt
    figures = scene.figures()
    assert figures.host_waits == 1
    assert figures.host_seconds > 0.5 * figures.offload.seconds
    events = scene.events(tmp_path / "trace.json")
    [wait], [copy] = on_track(events, "host: waits"), on_track(events, "copies: offload")
    assert wait["dur"] == pytest.approx(figures.host_seconds * 1e6, abs=1e-2)
    assert end(wait) == pytest.approx(end(copy), abs=0.5 * copy["dur"])


def test_the_limit_bounds_the_records_and_not_the_figures(device: str, tmp_path: Path) -> None:
    scene = Scene(device, limit=4)
    for layer in range(50):
        scene.trace.layer_begins(0, layer)
        scene.trace.saved(0, layer, MIB)
        scene.wait(scene.copy(nbytes=1000))
        with scene.trace.host_waits():
            pass
    figures = scene.figures()
    assert (figures.offload.groups, figures.offload.blocks, figures.offload.nbytes) == (50, 50, 50_000)
    assert figures.host_waits == 50
    drawn = [event for event in scene.events(tmp_path / "trace.json") if event["ph"] in "Xi"]
    assert 0 < len(drawn) <= 4
    scene.finish()


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_refused(device: str, limit: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1 record, not {limit}"):
        Trace(Device(device), limit=limit)


@pytest.mark.usefixtures("no_gc")
def test_events_are_let_go_of_when_they_have_come_to_pass(scene: Scene) -> None:
    ended = scene.copy()
    scene.wait(ended)
    scene.side.synchronize()
    scene.compute.synchronize()
    scene.trace.saved(0, 0, MIB)
    event = weakref.ref(ended)
    del ended
    assert event() is None


@pytest.mark.usefixtures("no_gc")
def test_a_trace_keeps_no_memory_and_goes_without_the_garbage_collector(device: str, device_module: Any) -> None:
    before = device_module.memory_allocated()
    scene = Scene(device)
    scene.wait(scene.copy(nbytes=8 * MIB))
    trace = scene.trace
    scene.finish()
    assert device_module.memory_allocated() == before
    del scene
    gone = weakref.ref(trace)
    del trace
    assert gone() is None


def test_times_hold_together_over_many_bases(scene: Scene, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tiered_mem.trace._REBASE_SECONDS", 0.0)
    begin = scene.trace._base
    marks = []
    for layer in range(20):
        marks.append(scene.device.timed_event(scene.compute))
        scene.trace.layer_begins(0, layer)
        scene.work(MIB)
        scene.compute.synchronize()
    marks.append(scene.device.timed_event(scene.compute))
    spans = on_track(scene.events(tmp_path / "trace.json"), "compute: layers")
    assert scene.trace._base is not begin
    between = [1e6 * scene.device.elapsed(begin.event, mark) for mark in marks]
    for i, span in enumerate(spans):
        assert between[i] - 1 <= span["ts"] <= between[i + 1] + 1


def test_a_backward_layer_ends_where_the_next_begins_or_nothing_is_known(scene: Scene, tmp_path: Path) -> None:
    trace = scene.trace
    for layer in (0, 1):
        trace.layer_begins(7, layer)
        scene.work(MIB)
        trace.layer_ends(7, layer)
    scene.work(MIB)
    trace.layer_begins(7, 1, backward=True)
    scene.work(MIB)
    trace.layer_begins(7, 0, backward=True)
    scene.work(MIB)
    trace.saved(8, 0, MIB)
    events = scene.events(tmp_path / "trace.json")
    spans = on_track(events, "compute: layers")
    assert [span["name"] for span in spans] == ["forward 0", "forward 1", "backward 1", "backward 0"]
    assert {span["args"]["graph"] for span in spans} == {7}
    assert end(spans[1]) < spans[2]["ts"]
    assert end(spans[2]) == pytest.approx(spans[3]["ts"], abs=2e-3)
    [last] = on_track(events, "compute: layers", "i")
    assert end(spans[3]) == pytest.approx(last["ts"], abs=2e-3)


def test_a_layer_that_does_not_end_gives_way_to_the_next(scene: Scene, tmp_path: Path) -> None:
    """An exception in a forward; then an end that belongs to nothing."""
    scene.trace.layer_begins(0, 0)
    scene.trace.layer_begins(1, 0)
    scene.trace.layer_ends(0, 0)
    scene.work(MIB)
    scene.trace.layer_ends(1, 0)
    spans = on_track(scene.events(tmp_path / "trace.json"), "compute: layers")
    assert [span["args"]["graph"] for span in spans] == [0, 1]


def test_saved_bytes_rise_in_forward_and_fall_in_backward(scene: Scene, tmp_path: Path) -> None:
    trace = scene.trace
    for layer in (0, 1):
        trace.layer_begins(0, layer)
        trace.saved(0, layer, (layer + 1) * MIB)
        trace.saved(0, layer, MIB)
    trace.layer_begins(0, 1)  # called a second time
    trace.saved(0, 1, MIB)
    for layer in (1, 0):
        trace.layer_begins(0, layer, backward=True)
    events = scene.events(tmp_path / "trace.json")
    counts = [e["args"]["bytes"] // MIB for e in events if e["ph"] == "C" and e["name"] == "saved bytes"]
    assert counts == [1, 2, 4, 5, 6, 2, 0]
    saves = [event["args"] for event in on_track(events, "compute: layers", "i")]
    assert saves[2] == {"graph": 0, "layer": 1, "bytes": 2 * MIB}


def test_a_second_compute_stream_has_tracks_of_its_own(scene: Scene, tmp_path: Path) -> None:
    other = scene.device.new_stream()
    scene.trace.layer_begins(0, 0)
    with scene.device.on(other):
        scene.trace.layer_begins(1, 0)
        scene.trace.layer_ends(1, 0)
    scene.trace.layer_ends(0, 0)
    events = scene.events(tmp_path / "trace.json")
    [first] = on_track(events, "compute: layers")
    [second] = on_track(events, f"compute: layers, stream {other.stream_id}")
    assert (first["args"]["graph"], second["args"]["graph"]) == (0, 1)


@pytest.mark.schedules("eager", "late", why="its copies run when they like")
def test_a_step_is_drawn(scene: Scene, link: Link, tmp_path: Path) -> None:
    link(SLOW)
    trace = scene.trace
    trace.layer_begins(0, 0)
    trace.saved(0, 0, 4 * MIB)
    trace.layer_ends(0, 0)
    offloads = [scene.copy("offload", size * MIB) for size in (4, 4, 16)]
    trace.layer_begins(0, 1)
    scene.wait(offloads[-1])
    trace.layer_ends(0, 1)
    trace.layer_begins(0, 0, backward=True)
    scene.wait(scene.copy("reload", 16 * MIB), "reload")
    events = scene.events(tmp_path / "trace.json")
    figures = scene.figures()
    copies = on_track(events, "copies: offload")
    assert sum(copy["dur"] for copy in copies) / 1e6 == pytest.approx(figures.offload.seconds, rel=1e-3)
    for copy, size in zip(copies, (4, 4, 16), strict=True):
        assert (copy["args"]["bytes"], copy["args"]["blocks"]) == (size * MIB, 1)
        assert copy["args"]["GB/s"] == pytest.approx(size * MIB / copy["dur"] / 1e3, abs=1e-3)
    release, reload = on_track(events, "compute: waits")
    assert (release["name"], release["args"]) == ("release", {"layer": "forward 1"})
    assert (reload["name"], reload["args"]) == ("reload", {"layer": "backward 0"})
    assert end(release) == pytest.approx(end(copies[-1]), abs=1e-2)
    assert end(reload) == pytest.approx(end(on_track(events, "copies: reload")[0]), abs=1e-2)
    layer = next(span for span in on_track(events, "compute: layers") if span["name"] == "forward 1")
    assert layer["ts"] <= release["ts"] <= end(release) <= end(layer)


def test_the_cpu_is_traced(tmp_path: Path) -> None:
    scene = Scene("cpu")
    scene.trace.layer_begins(0, 0)
    scene.wait(scene.copy("offload", 8 * MIB))
    scene.wait(scene.copy("reload", 8 * MIB), "reload")
    scene.trace.layer_ends(0, 0)
    figures = scene.figures()
    assert (figures.offload.nbytes, figures.reload.nbytes) == (8 * MIB, 8 * MIB)
    assert figures.offload.hidden == figures.reload.hidden == 1
    assert figures.stalls == ()
    assert len(on_track(scene.events(tmp_path / "trace.json"), "compute: layers")) == 1


def test_the_summary_is_for_people() -> None:
    nothing = Copies(0, 0, 0, 0.0, 0.0)
    assert summary_rows(Figures(nothing, nothing, (), 0, 0.0)) == [
        ("offload copies", "none"),
        ("reload copies", "none"),
        ("compute waited for them", "never"),
        ("host waited for room", "0.0 ms"),
    ]
    stalls = (
        Stall("release", 7, False, 1.2e-3),
        Stall("reload", 0, True, 0.4e-3),
        Stall("release", None, False, 0.1e-3),
        Stall("release", 3, False, 0.1e-3),
    )
    offload = Copies(96 * MIB, 20, 12, 24.1e-3, 1.687e-3)
    assert summary_rows(Figures(offload, Copies(MIB, 1, 1, 20.0, 40.0), stalls, 2, 12.0)) == [
        ("offload copies", "96.0 MiB in 12 groups, 24.1 ms, 93 % hidden"),
        ("reload copies", "1.0 MiB in 1 groups, 20.0 s, 0 % hidden"),
        (
            "compute waited for them",
            "1.8 ms: 1.2 ms release in forward 7, 0.4 ms reload in backward 0, 0.1 ms release in no layer",
        ),
        ("host waited for room", "12.0 s"),
    ]

"""What a trace exports for a viewer: copies, waits, layers and saved bytes, on one time axis."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path

import pytest

from tests.conftest import Link
from tests.trace.scene import MIB, SLOW, Events, Scene, end, on_track
from tiered_mem.trace.recorder import Trace
from tiered_mem.trace.records import SCHEMA, Levels


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
    assert figures.host_waits.count == 1
    assert figures.host_waits.seconds > 0.5 * figures.offload.seconds
    events = scene.events(tmp_path / "trace.json")
    [wait], [copy] = on_track(events, "host: waits"), on_track(events, "copies: offload")
    assert wait["dur"] == pytest.approx(figures.host_waits.seconds * 1e6, abs=1e-2)
    assert end(wait) == pytest.approx(end(copy), abs=0.5 * copy["dur"])


def test_times_hold_together_over_many_bases(scene: Scene, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tiered_mem.trace.recorder._REBASE_SECONDS", 0.0)
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


def counted(events: Events, counter: str) -> list[int]:
    return [event["args"]["bytes"] for event in events if event["ph"] == "C" and event["name"] == counter]


def test_the_bytes_in_the_tiers_are_asked_for_where_layers_begin_and_end(device: str, tmp_path: Path) -> None:
    """A counter has an event only where it is another than before; what nobody counts has none."""
    asked = itertools.count(1)
    scene = Scene(device, levels=lambda: Levels(next(asked), 7, None))
    scene.trace.layer_begins(0, 0)
    scene.copy()  # a layer goes on
    scene.trace.saved(0, 0, MIB)
    scene.trace.layer_ends(0, 0)
    scene.copy()  # its backward is to come
    scene.trace.layer_begins(0, 0, backward=True)
    scene.trace.backward_ends()
    scene.copy()  # between steps
    scene.copy("reload")
    scene.trace.layer_begins(1, 0)
    scene.trace.mark(None)
    events = scene.events(tmp_path / "trace.json")
    assert counted(events, "device bytes") == [1, 2, 3, 4, 5, 6, 7]
    assert counted(events, "host bytes") == [7]
    assert counted(events, "disk bytes") == []
    scene.finish()


@pytest.mark.schedules("eager", "late", why="its copies run when they like")
def test_the_bytes_in_the_tiers_are_asked_for_where_compute_waits(device: str, link: Link, tmp_path: Path) -> None:
    link(SLOW)
    asked = itertools.count(1)
    scene = Scene(device, pending=4, levels=lambda: Levels(next(asked), None, None))
    scene.trace.layer_begins(0, 0)
    scene.wait(scene.copy(nbytes=4 * MIB))
    scene.wait(scene.device.timed_event(scene.compute))  # no copy's end
    events = scene.events(tmp_path / "trace.json")
    assert counted(events, "device bytes") == [1, 2]
    scene.finish()


def test_a_level_is_at_the_moment_of_its_layer(device: str, tmp_path: Path) -> None:
    scene = Scene(device, levels=lambda: Levels(MIB, None, None))
    scene.trace.layer_begins(0, 0)
    scene.work(MIB)
    scene.trace.layer_ends(0, 0)
    events = scene.events(tmp_path / "trace.json")
    [layer] = on_track(events, "compute: layers")
    [level] = [event for event in events if event["name"] == "device bytes"]
    assert level["ts"] == layer["ts"]
    scene.finish()


def test_a_chart_says_its_version_and_what_else_it_is_given(scene: Scene) -> None:
    about = scene.trace.chart({"report": "all is well"})["otherData"]
    assert about == {"schema": SCHEMA, "older records left out": 0, "report": "all is well"}


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

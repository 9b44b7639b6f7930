"""A trace tells how long copies took and who waited for them. The link makes the durations."""

from __future__ import annotations

import json
import sys
import time
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Link
from tests.models import stack
from tests.trace.scene import MIB, SLOW, SLOW_BYTES_PER_S, Scene, events_in, on_track
from tiered_mem import TieringManager
from tiered_mem.device.device import Device
from tiered_mem.device.transfer import Direction
from tiered_mem.policies import LayerOrderPolicy
from tiered_mem.trace.recorder import Figures, Stall, Total, Trace, summary_rows


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
    assert (copies.nbytes, copies.blocks, copies.count) == (6 * MIB, 2, 2)
    assert 0.99 * copies.nbytes / SLOW_BYTES_PER_S <= copies.seconds <= passed
    assert others == Total()
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
    assert figures.offload.count == 3
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
    assert scene.figures().offload.count == 0


@pytest.mark.schedules("eager", "late", why="its copies run when they like")
def test_recording_does_not_wait_for_the_device(scene: Scene, link: Link) -> None:
    link(SLOW)
    ended = scene.copy(nbytes=16 * MIB)
    scene.trace.layer_begins(0, 0)
    scene.trace.saved(0, 0, MIB)
    scene.wait(ended)
    scene.trace.layer_ends(0, 0)
    assert not ended.query()


def test_the_limit_bounds_the_records_and_not_the_figures(device: str, tmp_path: Path) -> None:
    scene = Scene(device, limit=4)
    for layer in range(50):
        scene.trace.layer_begins(0, layer)
        scene.trace.saved(0, layer, MIB)
        scene.wait(scene.copy(nbytes=1000))
        with scene.trace.host_waits():
            pass
    figures = scene.figures()
    assert (figures.offload.count, figures.offload.blocks, figures.offload.nbytes) == (50, 50, 50_000)
    assert figures.host_waits.count == 50
    drawn = [event for event in scene.events(tmp_path / "trace.json") if event["ph"] in "Xi"]
    assert 0 < len(drawn) <= 4
    scene.finish()


def test_training_makes_no_more_records_than_are_kept(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the limit cuts off, what is left is a trace that a viewer can read, and the figures are of all."""
    model, x = stack(3, device)
    monkeypatch.setattr("tiered_mem.manager.Trace", partial(Trace, limit=40))
    with TieringManager(
        policy=LayerOrderPolicy(2), device=device, host_bytes="64MiB", spill_dir=tmp_path, trace=True
    ) as manager:
        trace = manager._trace
        assert trace is not None
        for step in range(1, 21):
            with manager.offload_context(model.layers, min_bytes=1024):
                loss = model(x)
            loss.backward()
            manager.synchronize()
            manager.export_trace(tmp_path / "trace.json")
            assert len(trace._records) <= 40
            left_out = json.loads((tmp_path / "trace.json").read_text())["otherData"]["older records left out"]
            assert left_out == trace._timed - len(trace._records)
            assert len(on_track(events_in(tmp_path / "trace.json"), "compute: layers")) > 3
            if step == 1:
                blocks, groups = trace.figures().reload.blocks, trace.figures().reload.count
        assert left_out > 40
        figures = trace.figures()
    assert (figures.reload.blocks, figures.reload.count) == (20 * blocks, 20 * groups)


@pytest.mark.parametrize("limit", range(1, 30))
def test_a_trace_that_was_cut_off_anywhere_can_be_read(device: str, tmp_path: Path, limit: int) -> None:
    scene = Scene(device, limit=limit)
    trace = scene.trace
    now = time.perf_counter()
    for graph in range(3):
        for layer in (0, 1):
            trace.layer_begins(graph, layer)
            trace.saved(graph, layer, MIB)
            trace.layer_ends(graph, layer)
            scene.wait(scene.copy(nbytes=1000))
            trace.file_moved("write", 1000, now + graph, now + graph + 1)
        with trace.host_waits():
            pass
        for layer in (1, 0):
            trace.layer_begins(graph, layer, backward=True)
            scene.wait(scene.copy("reload", 1000), "reload")
        trace.backward_ends()
    events = scene.events(tmp_path / "trace.json")
    counts = [event["args"]["bytes"] for event in events if event["ph"] == "C"]
    assert all(0 <= count <= 2 * MIB for count in counts)
    left_out = json.loads((tmp_path / "trace.json").read_text())["otherData"]["older records left out"]
    kept = len(trace._records), len(trace._files)
    assert kept == (limit, min(limit, 6))
    assert 3 * 16 <= left_out + sum(kept) <= 3 * 20  # of the waits those that were not over before they began
    scene.finish()


def test_times_that_are_due_are_read_a_few_at_once(device: str, link: Link) -> None:
    """The host would else be held up, just where a step begins."""
    scene = Scene(device)
    source, destination = scene.pair("offload", MIB)
    link(SLOW)
    with scene.trace.copying("offload", scene.side, MIB, 1), scene.device.on(scene.side):
        destination.copy_(source, non_blocking=True)
    for layer in range(20):
        scene.trace.layer_begins(0, layer)
    before = len(scene.trace._pending)
    scene.finish()
    scene.trace.poll()
    assert before - 4 <= len(scene.trace._pending) < max(before, 1)
    scene.trace.poll(wait=True)
    assert not scene.trace._pending


def test_no_more_records_are_pending_than_may_be(device: str, link: Link) -> None:
    scene = Scene(device, pending=5)
    source, destination = scene.pair("offload", MIB)
    link(SLOW)
    for layer in range(4):
        with scene.trace.copying("offload", scene.side, MIB, 1), scene.device.on(scene.side):
            destination.copy_(source, non_blocking=True)
        assert len(scene.trace._pending) <= 5
        for _ in range(6):
            scene.trace.layer_begins(0, layer)
            assert len(scene.trace._pending) <= 5
    assert scene.figures().offload.count == 4
    scene.finish()


@pytest.mark.parametrize("limit", [0, -1])
@pytest.mark.parametrize("name", ["limit", "pending"])
def test_a_limit_below_one_is_refused(device: str, name: str, limit: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1 record, not {limit}"):
        Trace(Device(device), **{name: limit})


@pytest.mark.usefixtures("no_gc")
def test_events_are_let_go_of_when_they_have_come_to_pass(scene: Scene) -> None:
    ended, nobodys = scene.copy(), object()
    scene.wait(ended)
    scene.side.synchronize()
    scene.compute.synchronize()
    scene.trace.saved(0, 0, MIB)
    assert sys.getrefcount(ended) == sys.getrefcount(nobodys)


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
    nothing = Total()
    assert summary_rows(Figures(nothing, nothing, (), nothing, nothing, nothing)) == [
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
    offload = Total(12, 24.1e-3, 96 * MIB, 20, 1.687e-3)
    reload = Total(1, 20.0, MIB, 1, 40.0)
    assert summary_rows(Figures(offload, reload, stalls, Total(2, 12.0), nothing, nothing)) == [
        ("offload copies", "96.0 MiB in 12 groups, 24.1 ms, 93 % hidden"),
        ("reload copies", "1.0 MiB in 1 groups, 20.0 s, 0 % hidden"),
        (
            "compute waited for them",
            "1.8 ms: 1.2 ms release in forward 7, 0.4 ms reload in backward 0, 0.1 ms release in no layer",
        ),
        ("host waited for room", "12.0 s"),
    ]

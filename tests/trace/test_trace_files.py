"""A trace shows when the threads of the disk tier read and write."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from tests.conftest import Link
from tests.spilling import Training
from tests.trace.scene import MIB, SLOW, Events, Scene, end, events_in, on_track
from tiered_mem import TieringManager
from tiered_mem.policies import LayerOrderPolicy
from tiered_mem.trace.recorder import Figures, Total, summary_rows


def tracks(events: Events) -> list[str]:
    return [event["args"]["name"] for event in events if event["name"] == "thread_name"]


def spans(events: Events, kind: str) -> Events:
    """On all tracks of writes, or of reads."""
    names = [name for name in tracks(events) if name.startswith(f"disk: {kind}s")]
    return [span for name in names for span in on_track(events, name)]


def test_what_goes_on_side_by_side_is_on_tracks_of_its_own(scene: Scene, tmp_path: Path) -> None:
    now = time.perf_counter()
    # Told as they end, which is another order than that in which they began.
    for began, ended in ((1, 3), (0, 4), (2, 5), (3, 6), (4, 7)):
        scene.trace.file_moved("write", 1000, now + began, now + ended)
    scene.trace.file_moved("read", 2_000_000_000, now + 1, now + 2)
    events = scene.events(tmp_path / "trace.json")
    durations = {
        name: [round(span["dur"] / 1e6) for span in on_track(events, name)]
        for name in tracks(events)
        if name.startswith("disk")
    }
    assert durations == {
        "disk: writes": [4, 3],
        "disk: writes, 2": [2, 3],
        "disk: writes, 3": [3],
        "disk: reads": [1],
    }
    [read] = spans(events, "read")
    assert read["args"] == {"bytes": 2_000_000_000, "GB/s": 2.0}


@pytest.mark.schedules("eager", "late", why="its copies run when they like")
def test_files_are_on_the_time_axis_of_the_layers(scene: Scene, link: Link, tmp_path: Path) -> None:
    link(SLOW)
    work = scene.prepare_work(16 * MIB)
    scene.trace.layer_begins(0, 0)
    began = time.perf_counter()
    work()
    scene.compute.synchronize()
    scene.trace.file_moved("read", 1000, began, time.perf_counter())
    scene.trace.layer_ends(0, 0)
    events = scene.events(tmp_path / "trace.json")
    [layer], [read] = on_track(events, "compute: layers"), spans(events, "read")
    assert read["ts"] == pytest.approx(layer["ts"], abs=0.3 * layer["dur"])
    assert end(read) == pytest.approx(end(layer), abs=0.3 * layer["dur"])


def test_figures_are_about_all_files(device: str, tmp_path: Path) -> None:
    scene = Scene(device, limit=3)
    now = time.perf_counter()
    for _ in range(10):
        scene.trace.file_moved("write", MIB, now, now + 0.5)
    assert scene.figures().writes == Total(10, 5.0, 10 * MIB)
    assert scene.figures().reads == Total()
    assert len(spans(scene.events(tmp_path / "trace.json"), "write")) == 3


def test_the_summary_tells_of_files() -> None:
    nothing = Total()
    rows = summary_rows(Figures(nothing, nothing, (), nothing, Total(4, 0.5, 2_000_000_000), Total(1)))
    assert rows[-2:] == [("files written", "4, 1.9 GiB, 4.00 GB/s each"), ("files read", "1, 0 B, in no time")]


def test_all_that_a_manager_spills_is_shown(device: str, training: Training, tmp_path: Path) -> None:
    """Activations as well as states."""
    folder = tmp_path / "spill"
    folder.mkdir()
    with TieringManager(
        policy=LayerOrderPolicy(in_flight=1), device=device, host_bytes="6MiB", spill_dir=folder, trace=True
    ) as manager:
        assert training.step(manager)
        manager.synchronize()
        before = manager.stats()["disk.written.total"]
        assert before > 0
        params = [torch.nn.Parameter(torch.ones(1000, device=device)) for _ in range(3)]
        optimizer = manager.register_optimizer(torch.optim.AdamW(params), bucket_bytes="16KiB", residency="disk")
        for _ in range(2):
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()
        manager.synchronize()
        assert manager.stats()["disk.written.total"] > before
    # Closed, as what the next step begins with is read ahead.
    manager.export_trace(tmp_path / "trace.json")
    events, stats, summary = events_in(tmp_path / "trace.json"), manager.stats(), manager.memory_summary()
    for kind, nbytes in (("write", stats["disk.written.total"]), ("read", stats["disk.read.total"])):
        assert sum(span["args"]["bytes"] for span in spans(events, kind)) == nbytes
    assert "files written" in summary
    assert "files read" in summary

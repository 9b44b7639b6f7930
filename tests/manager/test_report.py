"""manager.report(), and the figures in it against the emulator's timeline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from emulator.tests.launch import EMULATOR, run
from tests.conftest import EMULATED
from tests.manager.test_auto import make, train
from tiered_mem import TieringManager
from tiered_mem.policies.planning.report import Report

# Layers whose copies take longer than they do, so that planned steps wait; and what the timeline has of one.
TRAIN = """
import json, sys
import ascend_emulator, torch
from torch import nn
from tiered_mem import TieringManager

with torch.device("npu"):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4096, 4096), nn.Tanh()) for _ in range(8)))
    x = torch.zeros(8192, 4096)
policy = dict(policy="auto", device_budget=sys.argv[1] if len(sys.argv) > 1 else None)
policy |= {"recompute": False} if "moving" in sys.argv else {}
with TieringManager(device="npu", host_bytes="4GiB", **policy) as manager, manager.attach(model):
    optimizer = None
    if "states" in sys.argv:
        optimizer = manager.register_optimizer(torch.optim.AdamW(model.parameters()), overlap="backward")
    peaks = []
    for step in range(6):
        torch.npu.synchronize()
        torch.npu.reset_peak_memory_stats()
        began = ascend_emulator.now()
        with ascend_emulator.record_timeline() as spans:
            model(x).sum().backward()
            if optimizer is not None:
                optimizer.step()
            model.zero_grad()
            torch.npu.synchronize()
        seconds = ascend_emulator.now() - began
        peaks.append(torch.npu.max_memory_allocated())
        if step == 4:
            kernels = [span for span in spans if not span.name.startswith("copy")]
            kernels.sort(key=lambda span: span.start)
            gaps = [after.start - before.end for before, after in zip(kernels, kernels[1:])]
            waits, measured = sum(gap for gap in gaps if gap > 1e-3), seconds
    print(json.dumps({"report": manager.report().as_dict(), "waits": waits, "seconds": measured, "peaks": peaks}))
"""


def test_a_report_of_planned_steps(device: str) -> None:
    model, x = make(device)
    with (
        TieringManager(policy="auto", device_budget="256MiB", device=device, host_bytes="32MiB") as manager,
        manager.attach(model, min_bytes=4096),
    ):
        assert "the first step is recorded, and the next one like it goes by a plan" in str(manager.report())
        assert "planned" not in manager.memory_summary()
        train(model, x, 8)
        report = manager.report()
        assert isinstance(report, Report)
        assert report.step is not None
        assert report.measured is not None
        assert report.measured > 0 < report.compute
        assert report.measured_peak is not None
        assert 0 < report.measured_peak <= report.budget == 256 << 20
        assert manager.memory_summary().endswith(str(report))


def test_other_policies_report_what_moved() -> None:
    model, x = make("cpu")
    with (
        TieringManager(policy="layer-order", device="cpu", host_bytes="32MiB") as manager,
        manager.attach(model, min_bytes="300KiB"),
    ):
        train(model, x, 2)
        report = manager.report()
        stats = manager.stats()
    assert report.missing.startswith("LayerOrderPolicy makes no plans, as policy='auto' does")
    assert report.moved_until_now == stats["offloaded.bytes.total"]
    assert report.stayed_until_now == {"in tensors below min_bytes": stats["stayed.small.bytes.total"]}
    assert "in tensors below min_bytes" in str(report)


@pytest.mark.slow(why="a process trains in a dry run")
@pytest.mark.skipif(not EMULATED, reason="it is about modelled time")
def test_the_report_tells_what_the_timeline_shows(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    options = ("--clock", "910b3", "--dry", "--hbm", "8GiB", "--h2d", "4GB/s", "--d2h", "4GB/s")
    done = run(*EMULATOR, *options, str(script), "1700MiB", "moving", cwd=tmp_path, pythonpath=Path.cwd())
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    report = said["report"]
    waits = sum(stall["measured"] for stall in report["stalls"])
    assert report["step"] == 4
    assert waits > 0.2 * report["compute"], "nothing waits"
    # A step of the report ends where the next one begins.
    assert said["seconds"] <= report["measured"] <= 1.05 * said["seconds"]
    assert waits == pytest.approx(said["waits"], rel=0.02)
    assert report["planned"] == pytest.approx(report["measured"], rel=0.03)
    for stall in report["stalls"]:
        assert stall["seconds"] == pytest.approx(stall["measured"], abs=0.02 * report["measured"])
    assert report["planned_hidden"] == pytest.approx(report["measured_hidden"], abs=0.05)
    assert report["treatments"] == []
    assert any(text.startswith('TieringManager(recompute="auto")') for text in report["advice"])


@pytest.mark.slow(why="a process trains in a dry run")
@pytest.mark.skipif(not EMULATED, reason="it is about modelled time")
def test_the_report_tells_which_layers_are_computed_again(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    steps = TRAIN.replace("range(6)", "range(19)").replace("step == 4", "step == 17")
    script.write_text(steps.replace("nn.Tanh()", "nn.Tanh(), nn.Sigmoid()"))
    options = ("--clock", "910b3", "--dry", "--hbm", "8GiB", "--h2d", "4GB/s", "--d2h", "4GB/s")
    done = run(*EMULATOR, *options, str(script), "1700MiB", cwd=tmp_path, pythonpath=Path.cwd())
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    report = said["report"]
    again = [each for each in report["treatments"] if each["how"] is not None]
    assert again
    assert sorted(layer for each in report["treatments"] for layer in each["layers"]) == list(range(8))
    assert all(each["again"] > 0 for each in again)
    assert all(each["less"] > 0 for each in again if each["how"] == "full")
    assert sum(each["less"] for each in again) > 0
    assert report["trying"] is False
    assert max(said["peaks"]) <= 1700 << 20  # also in the first step that is treated so
    assert report["measured_peak"] <= report["planned_peak"]
    assert said["seconds"] <= report["measured"] < 0.3  # moving alone takes 0.62
    assert report["planned"] == pytest.approx(report["measured"], rel=0.03)


@pytest.mark.slow(why="a process trains in a dry run")
@pytest.mark.skipif(not EMULATED, reason="it is about modelled time")
def test_waits_for_states_in_backward_are_no_compute(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    options = ("--clock", "910b3", "--dry", "--hbm", "8GiB", "--h2d", "8GB/s", "--d2h", "8GB/s")
    done = run(*EMULATOR, *options, str(script), "2500MiB", "states", cwd=tmp_path, pythonpath=Path.cwd())
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    report = said["report"]
    assert report["states_beside_backward"] == 2 * 4 * 8 * (4096 + 1) * 4096
    assert (report["states_kept"], report["moved"]) == (0, 0)
    waits = sum(stall["measured"] for stall in report["stalls"])
    assert waits > 0.2 * report["compute"], "nothing waits"
    assert waits == pytest.approx(said["waits"], rel=0.02)
    assert report["compute"] + waits == pytest.approx(report["measured"])
    assert report["planned"] == pytest.approx(report["measured"], rel=0.06)

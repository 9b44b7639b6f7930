"""Profilers show the CPU's operators; of the device they say what shows what ran there."""

import json
from pathlib import Path

import pytest
import torch
import torch_npu
from torch.profiler import ProfilerActivity

pytestmark = pytest.mark.once(why="a profiler sees the same operators in each schedule")

INSTEAD = "the emulated NPU has no profiler of the device; python -m ascend_emulator --timeline FILE writes"


def step() -> None:
    weight = torch.ones(8, 8, device="npu", requires_grad=True)
    (weight @ weight).sum().backward()


def test_torch_profiler_shows_operators_on_the_cpu(tmp_path: Path) -> None:
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    names = {event.get("name") for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert {"aten::matmul", "aclnnMatmul"} <= names


def test_the_profiler_of_autograd_times_operators_by_events_on_the_device() -> None:
    with torch.autograd.profiler.profile(use_device="npu") as profiler:
        step()
    table = profiler.key_averages().table()
    assert "NPU time avg" in table
    assert "aten::matmul" in table


# Once in a process, of which no other test profiles the device.
@pytest.mark.skipif(torch.version.cuda is not None, reason="torch's CUDA build asks CUPTI what ran, not torch_npu")
def test_torch_profiler_says_once_that_it_sees_nothing_of_the_device(capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]) as profiler:
            step()
        assert "aten::matmul" in {event.key for event in profiler.key_averages()}
    assert capfd.readouterr().err.count(f"torch.profiler: {INSTEAD}") == 1


def test_the_profiler_of_torch_npu_says_that_it_sees_nothing_of_the_device(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    profilers = torch_npu.profiler
    ready = profilers.tensorboard_trace_handler(str(tmp_path))
    with profilers.profile(activities=[profilers.ProfilerActivity.NPU], on_trace_ready=ready):
        step()
    assert f"Call start failed. Exception: {INSTEAD}" in "".join(capfd.readouterr())


@pytest.mark.slow(why="the profiler starts a process that reads what it recorded")
def test_the_profiler_of_torch_npu_shows_operators_on_the_cpu(tmp_path: Path) -> None:
    profilers = torch_npu.profiler
    ready = profilers.tensorboard_trace_handler(str(tmp_path))
    with profilers.profile(activities=[profilers.ProfilerActivity.CPU], on_trace_ready=ready):
        step()
    (trace,) = tmp_path.rglob("trace_view.json")
    assert "aten::matmul" in {event.get("name") for event in json.loads(trace.read_text())}

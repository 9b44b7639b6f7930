"""The demo and the benchmark, short, as a user runs them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from emulator.tests.launch import HANGS_S
from emulator.tests.launch import run as run_plainly
from tests.conftest import EMULATED, RACES

ROOT = Path(__file__).parents[2]
SMALL = ["--layers", "3", "--width", "96", "--context", "128", "--batch", "8"]

pytestmark = [
    pytest.mark.skipif(not EMULATED, reason="the budgets are chosen for the emulated NPU"),
    pytest.mark.slow(why="each is a program that trains"),
]
no_detector = pytest.mark.skipif(RACES, reason="it measures, and the detector takes its part of the time")


def run(*arguments: str) -> str:
    """What a script prints on the emulated NPU; the test fails where the script does."""
    command = [sys.executable, "-m", "ascend_emulator", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANGS_S)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_what_is_missing_is_named(path: Path) -> None:
    """-S hides all installed packages, as if none were there."""
    if "__main__" not in path.read_text():
        return  # part of the others
    done = subprocess.run([sys.executable, "-S", str(path)], capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "pip install" in done.stderr


@pytest.mark.skipif(RACES, reason="test_offload_context.py has the detector look at the same, in less time")
def test_the_demo() -> None:
    # Of full size, in fewer steps: below it the caching allocator's 20 MiB segments decide what fits.
    printed = run("examples/train_gpt.py", "--steps", "2")
    assert "plain, budget: torch.OutOfMemoryError" in printed
    assert "bit-equal losses and final weights: yes" in printed


def test_the_pipeline(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    small = ["--layers", "1", "--width", "64", "--context", "128", "--batch", "16"]
    printed = run(
        "--h2d", "1GB/s", "--d2h", "1GB/s", "examples/pipeline_schedule.py", *small, "--trace", str(trace)
    )
    assert "gradients of both runs are bit-equal: yes" in printed
    assert re.search(r"reloads on demand +0\n", printed)
    assert re.search(r"offload copies .* hidden\n", printed)
    names = [event["name"] for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    steps = [name for name in names if name.split()[0] in ("forward", "backward")]
    order = list("0123041526374567")
    assert [name.split()[1] for name in steps[-16:]] == order


@pytest.mark.skipif(RACES, reason="test_spilling.py has the detector look at the same, in less time")
def test_the_spilling_example(tmp_path: Path) -> None:
    printed = run("examples/spill_to_ssd.py", "--steps", "2", "--spill-dir", str(tmp_path))
    assert "no disk: torch.OutOfMemoryError" in printed
    assert "are too much for both" in printed
    assert "bit-equal losses and final weights: yes" in printed
    assert "spill files left: 0" in printed
    assert re.search(r"kept, host tier full +0 blocks", printed)


@pytest.mark.skipif(RACES, reason="tests/integrations have the detector look at the same, in less time")
def test_the_trainer_example() -> None:
    pytest.importorskip("accelerate", reason="the Trainer needs it")
    printed = run("examples/trainer_llama.py", "--steps", "2", "--layers", "3", "--length", "128")
    assert "bit-equal losses and final weights: yes" in printed


@pytest.mark.skipif(RACES, reason="tests/phases have the detector look at the same, in less time")
def test_the_phases_example() -> None:
    printed = run("examples/rl_phases.py", "--steps", "1")
    assert "both there, budget: torch.OutOfMemoryError" in printed
    assert "are bit-equal with and without offloading: yes" in printed
    assert re.search(r"round 1: train +│ +25\d\.\d │ +1\d\d\.\d │ +20\d\.\d │ +0\.0 │", printed)


@pytest.mark.skipif(RACES, reason="tests/optimizer has the detector look at the same, in less time")
def test_the_optimizer_example(tmp_path: Path) -> None:
    printed = run("examples/optimizer_tiering.py", "--steps", "2", "--spill-dir", str(tmp_path))
    assert "plain, budget: torch.OutOfMemoryError" in printed
    assert re.search(r"states on host +\S+ +\S+ +1\d\d +\d+ +0 ", printed)
    assert re.search(r"states on disk +\S+ +\S+ +1\d\d +[2345]\d +1\d\d ", printed)
    assert "bit-equal losses and final weights: yes" in printed
    assert "spill files left: 0" in printed


@pytest.mark.skipif(RACES, reason="a dry run has no races")
def test_the_plan() -> None:
    done = run_plainly("examples/plan_7b.py", "--stride", "8", cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "plain: torch.OutOfMemoryError" in done.stdout
    (row,) = re.findall(r"│tiered, 8 layers │ +(.*) │", done.stdout)
    device, host, step, kernels, copies, hidden = re.split(r" +│ *", row)
    assert 40 < float(device) < 60
    assert 35 < float(host) < 40
    assert float(step) > float(kernels) > float(copies) > 1
    assert 0 < int(hidden.rstrip("%")) < 100
    planned = re.search(r"3 trainings were planned in \d+ s, with (.*) GiB of this machine's memory", done.stdout)
    assert planned is not None
    assert float(planned[1]) < 3


@no_detector
def test_the_optimizer_benchmark(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    small = ["--layers", "2", "--width", "64", "--bucket", "1MiB", "--rounds", "2", "--residency", "host", "disk"]
    printed = run("-m", "benchmarks.optimizer_step", *small, "--json", str(figures))
    assert "parameters are the same to the last bit" in printed


@no_detector
def test_the_hooks_benchmark(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    run("-m", "benchmarks.offload_hooks", *SMALL, "--rounds", "1", "--json", str(figures))
    assert "bit-equal" in figures.read_text()
    assert "WRONG" not in figures.read_text()


@no_detector
def test_the_overhead_benchmark(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    run("-m", "benchmarks.offload_overhead", *SMALL, "--offload", "2", "--repeats", "1", "--json", str(figures))
    result = json.loads(figures.read_text())
    assert result["bytes_copied_per_step"] > 0
    assert result["link_bytes_per_s"] > 0
    assert result["ratio"] > 0


@no_detector
def test_the_spill_benchmark(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    small = ("--bytes", "16MiB", "--record", "4MiB", "--rounds", "1")
    drives = [tmp_path / name for name in ("one", "other")]
    for drive in drives:
        drive.mkdir()
    run("-m", "benchmarks.spill", "--dir", *map(str, drives), *small, "--json", str(figures))
    result = json.loads(figures.read_text())
    assert result["disk tier, write, over safetensors"] > 0
    assert result["disk tier, read, over safetensors"] > 0
    assert result["disk tier, 2 drives, write (GB/s)"] > 0
    assert [list(drive.iterdir()) for drive in drives] == [[], []]

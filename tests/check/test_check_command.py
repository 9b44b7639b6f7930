"""The command: what it prints and writes, and its exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from emulator.tests.launch import EMULATOR, run
from tests.benchmarks.test_silicon import ended
from tests.check.conftest import ROOT
from tests.conftest import EMULATED
from tests.models import eventually

pytestmark = pytest.mark.once(why="it has a process of its own")
CHECK = ("-m", "tiered_mem", "check")


@pytest.mark.skipif(not EMULATED, reason="of the emulated device it is known that all lines pass")
@pytest.mark.slow(why="a whole run of the command")
def test_all_lines_pass_on_the_emulated_npu(tmp_path: Path) -> None:
    file, folder = tmp_path / "found.json", tmp_path / "drive"
    folder.mkdir()
    done = run(*EMULATOR, *CHECK, "--dir", str(folder), "-o", str(file), cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert [(each["name"], each["reason"]) for each in found["checks"] if each["verdict"] != "pass"] == []
    assert (found["schema"], found["device"]["kind"], found["device"]["name"]) == (1, "npu", "Ascend910B1")
    assert found["device"]["runtime"].endswith("ascend_emulator/lib/libascendcl.so")
    assert found["versions"]["torch_npu"].startswith("2.")
    assert {"date", "kernel", "cores", "ram_bytes", "cgroup_limits_bytes", "seconds", "quick"} < found.keys()
    rates = next(each["figures"] for each in found["checks"] if each["name"] == "link rates")
    assert {rates[name]["unit"] for name in ("to_host", "to_device", "both")} == {"GB/s"}
    table = [line for line in done.stdout.splitlines() if line.startswith("│")]
    assert [line for line in table if "pass" not in line and line.split("│")[1].strip()] == []
    assert f"attach {file} to an issue" in done.stdout
    assert list(folder.rglob("*.safetensors")) == []


@pytest.mark.slow(why="a whole run of the command")
def test_on_a_cpu_lines_that_mean_nothing_say_why(tmp_path: Path) -> None:
    done = run(
        *(*CHECK, "--device", "cpu", "--quick", "--dir", str(tmp_path)), cwd=ROOT, TORCH_DEVICE_BACKEND_AUTOLOAD="0"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not applicable │ a cpu copies from any memory" in done.stdout
    assert "tiered-mem check --device cpu" in done.stdout.splitlines()[-1]
    assert ".json" in done.stdout.splitlines()[-1]


@pytest.mark.slow(why="it waits for processes to begin and to end")
def test_a_worker_ends_with_the_command_that_was_killed(tmp_path: Path) -> None:
    """Even while a check hangs in it."""
    worker = ROOT / "tests" / "check" / "faulty_worker.py"
    pid = tmp_path / "pid"
    code = f"""
import os, sys
from pathlib import Path
from tiered_mem.check.runner import Runner
command = (sys.executable, {str(worker)!r}, "no end")
runner = Runner(device="cpu", folder={str(tmp_path)!r}, quick=True, limit=600, command=command)
Path({str(pid)!r}).write_text(str(runner.pid))
for line in runner.lines(lambda name: name == "records on the drive" and print(name, flush=True)):
    pass
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "records on the drive\n"
    process.kill()
    process.wait()
    process.stdout.close()
    assert eventually(lambda: ended(int(pid.read_text())))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--device", "tpu"), "unknown device 'tpu'; known are npu, cuda, cpu"),
        (("--device", "cuda"), "torch.cuda.is_available() is False"),
        (("--dir", "/nowhere"), "/nowhere is no directory; give one on the drive to check by --dir"),
        (("--limit", "0"), "--limit must be 1 or more"),
        (("-o", "/nowhere/found.json"), "/nowhere/found.json cannot be written: there is no such directory"),
    ],
)
def test_what_cannot_be_run(options: tuple[str, ...], words: str) -> None:
    if options[1] == "cuda" and not EMULATED:
        pytest.skip("there may be one here")
    done = run(*CHECK, *options, cwd=ROOT, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1

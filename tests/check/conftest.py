"""`tiered-mem check`, run whole: in a process of its own, or its runner in this one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from emulator.tests.launch import EMULATOR, run
from tiered_mem.check.runner import Line, Runner

ROOT = Path(__file__).parents[2]


class Lines(dict[str, Line]):
    """What a runner found, by name."""

    def only_failed(self, *names: str) -> str:
        """Why the first of these failed, if they and no others have, and all that did not run rest on them."""
        failed = {line.name: line.reason for line in self.values() if line.verdict == "fail"}
        assert failed.keys() == {*names}, failed
        reasons = {line.reason for line in self.values() if line.verdict == "not run"}
        assert reasons <= {f"it rests on {name!r}, which failed" for name in names}
        return failed[names[0]]


@pytest.fixture
def check_on_emulator(tmp_path: Path) -> Callable[..., tuple[int, Lines]]:
    """Runs the command on an emulated NPU with options of its own; its exit status and lines."""

    def check(*options: str, limit: str = "60") -> tuple[int, Lines]:
        file = tmp_path / "found.json"
        command = (*EMULATOR, *options, "-m", "tiered_mem", "check", "--device", "npu", "--dir", str(tmp_path))
        done = run(*command, "--quick", "--limit", limit, "-o", str(file), cwd=ROOT)
        assert file.exists(), done.stderr
        return done.returncode, Lines(
            (line["name"], Line(**line)) for line in json.loads(file.read_text())["checks"]
        )

    return check


@pytest.fixture
def check_with_faults(tmp_path: Path) -> Callable[..., Lines]:
    """Runs all checks of a cpu or of the device under test, in a worker with a fault of faulty_worker.py."""

    def check(fault: str, device: str, limit: float = 60) -> Lines:
        command = (sys.executable, str(Path(__file__).with_name("faulty_worker.py")), fault)
        runner = Runner(device=device, folder=str(tmp_path), quick=True, limit=limit, command=command)
        with closing(runner):
            return Lines((line.name, line) for line in runner.lines())

    return check

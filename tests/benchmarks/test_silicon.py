"""benchmarks.silicon, and the tests that it runs where much is missing: each part ends, and is told of."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks import silicon
from benchmarks.silicon import ROOT, Part
from emulator.tests.launch import run
from tests.models import eventually

pytestmark = pytest.mark.once(why="it starts processes, and looks at how they end")

LACKING = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        missing = ("ascend_emulator", "torch_npu", "hypothesis", "pytest_timeout", "xdist")
        return None if name.partition(".")[0] in missing else self.finder.find_spec(name, path, target)

# Nor does importlib.metadata find anything, such as pytest's plugins.
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""
FORK = """
import os, sys, time
child = os.fork()
if child:
    with open(sys.argv[1] + ".new", "w") as file:
        file.write(str(child))
    os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(1000)
"""
DIES = """
import os, signal, pytest

def test_right():
    pass

@pytest.mark.skip(reason="not today")
def test_left_out():
    pass

def test_wrong():
    assert 1 == 2

def test_deadly():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def environment(folder: Path) -> dict[str, str]:
    return dict(os.environ) | {"TMPDIR": str(folder)}


@pytest.mark.slow(why="a process imports torch")
def test_the_tests_run_without_the_emulator_and_what_else_a_machine_may_lack(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(LACKING)
    activations = ("tests/activations/test_repeated_blocks.py", "tests/activations/test_spilling.py")
    tests = ("tests/ground/test_sizes.py", *activations, "emulator/tests")
    wanted = ("-k", "test_sizes or test_repeated_blocks")
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, *wanted)
    done = run(*command, cwd=ROOT, pythonpath=tmp_path, TIERED_MEM_TEST_DEVICE="cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tests/ground/test_sizes.py:1: hypothesis is not installed here" in done.stdout
    assert " passed, " in done.stdout


@pytest.mark.parametrize("small", [False, True])
def test_what_is_to_run_is_there(small: bool) -> None:
    files = [word for part in silicon.parts("cuda", small) for word in part.arguments if word.startswith("tests/")]
    assert files
    assert [name for name in files if not (ROOT / name).exists()] == []
    modules = [part.arguments[1] for part in silicon.parts("cuda", small) if not part.tests]
    places = {name: ROOT / name.replace(".", "/") for name in modules}
    assert [name for name, path in places.items() if not (path.is_dir() or path.with_suffix(".py").exists())] == []
    assert modules[0] == "tiered_mem"


def test_a_part_that_lacks_a_package_is_not_run(tmp_path: Path) -> None:
    part = Part("lame", ("-c", "raise SystemExit(1)"), 1, needs=("sys", "no_such_package"))
    told = silicon.run(part, "cuda", environment(tmp_path), 10)
    assert (told["outcome"], told["why"]) == ("not run", "not installed here: no_such_package")
    device_only = Part("link", ("-c", "raise SystemExit(1)"), 1, on_cpu=False)
    assert silicon.run(device_only, "cpu", environment(tmp_path), 10)["outcome"] == "not run"


def test_a_part_that_fails_says_so_with_the_end_of_its_output(tmp_path: Path) -> None:
    part = Part("broken", ("-c", "print('a' * 5000); raise SystemExit('too bad')"), 1, needs=())
    told = silicon.run(part, "cuda", environment(tmp_path), 500)
    assert (told["outcome"], told["status"]) == ("failed", 1)
    output = str(told["output"])
    assert output.endswith("too bad\n")
    assert len(output) == 3000
    silent = Part("silent", ("-c", "pass"), 1, needs=())
    assert silicon.run(silent, "cuda", environment(tmp_path), 500)["outcome"] == "failed"


def test_nothing_is_left_of_a_process_that_runs_out_of_time(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    limit = 1.0
    while not pid.exists():  # a slow start is no reason to fail
        limit *= 2
        with (tmp_path / "log").open("w") as log:
            command = [sys.executable, "-S", "-c", FORK, str(pid)]
            assert silicon.status_of(command, environment(tmp_path), limit, log.fileno()) is None
    assert eventually(lambda: ended(int(pid.read_text())))


def ended(pid: int) -> bool:
    """Gone, or waiting for its new parent to hear of it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_tests_are_counted_up_to_the_end_of_their_process(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(DIES)
    words = ("-m", "pytest", "-q", "-c", os.devnull, "-p", "benchmarks.counted_tests", "-p", "no:cacheprovider")
    part = Part("tests: deadly", (*words, str(tmp_path / "test_it.py")), 1, needs=("pytest",))
    told = silicon.run(part, "cuda", environment(tmp_path), 500)
    assert (told["outcome"], told["status"]) == ("failed", -9)
    assert told["counts"] == {"passed": 1, "skipped": 1, "failed": 1}
    names = {each["test"].rpartition("::")[2]: each["why"] for each in json.loads(json.dumps(told["not_passed"]))}
    assert names["test_left_out"] == "not today"
    assert names["test_wrong"].startswith("assert 1 == 2")
    assert silicon.totals([told, told, {}]) == {"passed": 2, "skipped": 2, "failed": 2}

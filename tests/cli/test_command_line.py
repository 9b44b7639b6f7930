from __future__ import annotations

import json
import signal
from importlib.metadata import version
from pathlib import Path

import pytest

import tiered_mem
from emulator.tests.launch import run
from tests.cli.conftest import Command
from tests.conftest import KIND
from tests.spill.folders import leave_dead
from tests.spill.without_torch import ROOT
from tiered_mem.cli import main
from tiered_mem.versions import versions

needs_device = pytest.mark.skipif(KIND == "cpu", reason="there is any number of cpus")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "the following arguments are required: VERB"),
        (["wash"], "argument VERB: invalid choice: 'wash'"),
        (["inspect"], "the following arguments are required: DIR"),
        (["report", "a", "b"], "unrecognized arguments: b; see tiered-mem report --help"),
        (["inspect", "a", "--dry-run"], "unrecognized arguments: --dry-run; see tiered-mem inspect --help"),
        (["probe", "--bytes", "much"], "argument --bytes: 'much' is not a size; write an int"),
        (["probe", "--bytes", "0"], "argument --bytes: a size must be at least 1 byte"),
        (["probe", "--device", "tpu"], "unknown device 'tpu'; known are npu, cuda, cpu"),
        pytest.param(
            ["probe", "--device", f"{KIND}:99"], f"device '{KIND}:99' asked for, but ", marks=needs_device
        ),
    ],
)
def test_a_bad_argument_is_one_line(command: Command, arguments: list[str], why: str) -> None:
    done = command(*arguments)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith(f"tiered-mem: {why}")
    assert done.err.count("\n") == 1


def file(path: Path) -> Path:
    (path / "file").write_text("")
    return path / "file"


def link(path: Path) -> Path:
    (path / "link").symlink_to(path)
    return path / "link"


def open_to_all(path: Path) -> Path:
    path.chmod(0o777)
    return path


def home(path: Path) -> Path:
    return leave_dead(path).parent


def open_home(path: Path) -> Path:
    home(path).chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (file, "file is not a directory"),
        (link, "link is a symbolic link"),
        (open_to_all, "may be changed by everybody (mode 0777)"),
        (home, "give the directory above it"),
        (open_home, "is open to others (mode 0755)"),
    ],
)
@pytest.mark.parametrize("verb", [["inspect"], ["clean"], ["clean", "--dry-run"], ["probe", "--device", "cpu"]])
def test_a_refused_directory_is_one_line(
    command: Command, tmp_path: Path, verb: list[str], make: object, why: str
) -> None:
    assert callable(make)
    done = command(*verb, make(tmp_path))
    assert (done.status, done.out) == (2, "")
    assert why in done.err
    assert done.err.startswith(f"tiered-mem: {tmp_path}")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("verb", "advice"),
    [
        (["inspect"], "so no spill files are in it; give what was a manager's spill_dir"),
        (["clean"], "so no spill files are in it; give what was a manager's spill_dir"),
        (["clean", "--dry-run"], "so no spill files are in it; give what was a manager's spill_dir"),
        (["probe", "--device", "cpu"], "make it first, on a local drive"),
    ],
)
def test_only_who_writes_is_told_to_make_a_directory(
    command: Command, tmp_path: Path, verb: list[str], advice: str
) -> None:
    missing = tmp_path / "missing"
    done = command(*verb, missing)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith(f"tiered-mem: {missing} does not exist")
    assert advice in done.err
    assert done.err.count("\n") == 1


def test_the_versions_are_told(command: Command) -> None:
    done = command("--version")
    assert (done.status, done.err) == (0, "")
    assert done.out.splitlines()[0] == f"tiered-mem {tiered_mem.__version__}"
    assert f"torch {version('torch')}" in done.out.splitlines()
    told = json.loads(command("--version", "--json").out)
    assert told == {"schema": 1, **versions()}


def test_json_may_come_before_the_verb(command: Command, tmp_path: Path) -> None:
    before, after = command("--json", "clean", tmp_path), command("clean", tmp_path, "--json")
    assert before.out == after.out
    assert json.loads(before.out)["schema"] == 1


@pytest.mark.parametrize("verb", ["probe", "inspect", "clean", "plot", "report"])
def test_help_is_there(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    assert ended.value.code == 0
    assert f"usage: tiered-mem {verb}" in capsys.readouterr().out


def test_signals_are_as_they_were_afterwards(command: Command, tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    command("inspect", tmp_path)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before


def test_it_runs_as_a_module(tmp_path: Path) -> None:
    path = leave_dead(tmp_path)
    arguments = ("-m", "tiered_mem", "inspect", str(tmp_path))
    done = run(*arguments, cwd=ROOT, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert (done.returncode, done.stderr) == (0, "")
    assert path.name in done.stdout
    done = run(*arguments[:-1], cwd=ROOT, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == ("tiered-mem: the following arguments are required: DIR; see tiered-mem inspect --help\n")

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.cli.conftest import Command
from tests.emulator.launch import run
from tests.spill.folders import leave_dead
from tests.spill.without_torch import ROOT
from tiered_mem.cli import main


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "the following arguments are required: VERB"),
        (["wash"], "argument VERB: invalid choice: 'wash'"),
        (["inspect"], "the following arguments are required: DIR"),
        (["clean", "a", "b"], "unrecognized arguments: b"),
        (["probe", "--bytes", "much"], "argument --bytes: 'much' is not a size; write an int"),
        (["probe", "--bytes", "0"], "argument --bytes: a size must be at least 1 byte"),
        (["probe", "--device", "tpu"], "unknown device 'tpu'; known are npu, cuda, cpu"),
        (["probe", "--device", "npu:99"], "device 'npu:99' asked for, but "),
    ],
)
def test_a_bad_argument_is_one_line(command: Command, arguments: list[str], why: str) -> None:
    done = command(*arguments)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith(f"tiered-mem: {why}")
    assert done.err.count("\n") == 1


def missing(path: Path) -> Path:
    return path / "missing"


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
        (missing, "missing does not exist; make it first"),
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


@pytest.mark.parametrize("verb", ["probe", "inspect", "clean"])
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
    arguments = ("-m", "tiered_mem.cli", "inspect", str(tmp_path))
    done = run(*arguments, cwd=ROOT, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert (done.returncode, done.stderr) == (0, "")
    assert path.name in done.stdout
    done = run(*arguments[:-1], cwd=ROOT, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == ("tiered-mem: the following arguments are required: DIR; see tiered-mem inspect --help\n")

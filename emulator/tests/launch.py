"""Runs scripts in processes of their own, on the emulated NPU or plainly."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

# What scripts import emulator.tests from.
ROOT = Path(__file__).parents[2]
EMULATOR = ("-m", "ascend_emulator")
OF_RANKS = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
HANGS_S = 500  # less than pytest's own timeout, so that what the process has said is told


def run(
    *arguments: str, cwd: Path, pythonpath: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """python ARGUMENTS..., without what this process has in its environment of Ascend and the emulator.

    pythonpath: a folder to search before all others.
    """
    if os.environ.get("ASCEND_EMULATOR_SCHEDULE", "eager") != "eager":
        pytest.skip("starts a process with options of its own, which is the same in the eager schedule")
    if "--races" in arguments and _cannot_look_for_races():
        pytest.skip("the race detector needs an allocator that tells what it takes back, as that of torch_npu 2.13")
    folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(":") if folder not in ("", child())]
    if pythonpath is not None:
        folders.insert(0, str(pythonpath))
    if folders:
        environment = {"PYTHONPATH": ":".join(folders)} | environment
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=plain_environment(**environment),
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        check=False,
    )


def _cannot_look_for_races() -> bool:
    if importlib.util.find_spec("ascend_emulator") is None:
        return False
    from ascend_emulator.startup import can_look_for_races

    return not can_look_for_races()


def run_ranks(
    ranks: int, options: tuple[str, ...], *arguments: str, cwd: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """torch.distributed.run ARGUMENTS... on as many emulated devices."""
    command = command_of_ranks(ranks, options, *arguments)
    return run(*command, cwd=cwd, pythonpath=ROOT, **OF_RANKS | environment)


def fork_ranks(
    ranks: int, options: tuple[str, ...], module: str, *arguments: str, cwd: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The module on as many emulated devices, as ranks that have begun with torch imported."""
    forked = ("-m", "emulator.tests.forked_ranks", str(ranks), module)
    command = (*EMULATOR, "--devices", str(ranks), *options, *forked, *arguments)
    return run(*command, cwd=cwd, pythonpath=ROOT, **OF_RANKS | environment)


def command_of_ranks(ranks: int, options: tuple[str, ...], *arguments: str) -> list[str]:
    """What Python gets."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    return [*EMULATOR, "--devices", str(ranks), *options, *launcher, *arguments]


def child() -> str:
    """The folder that makes a child process one of this process's device; "" without the emulator."""
    if importlib.util.find_spec("ascend_emulator") is None:
        return ""
    from ascend_emulator.startup import CHILD

    return str(CHILD)


def plain_environment(**more: str) -> dict[str, str]:
    """This process's environment without what there is of Ascend, the emulator, torch and Python's path."""
    strange = ("ASCEND_", "TORCH_", "TASK_QUEUE_", "LD_LIBRARY_PATH", "PYTHONPATH")
    return {name: value for name, value in os.environ.items() if not name.startswith(strange)} | more


def write_script(folder: Path, text: str) -> str:
    """Puts the text in a script there and returns the script's name."""
    (folder / "script.py").write_text(dedent(text))
    return "script.py"

"""Code in a process of its own, which has the disk tier but not torch."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import CompletedProcess
from textwrap import dedent

from emulator.tests.launch import run
from tests.spill.without_torch import ROOT

NOBODY = 65534
_HEAD = """
import os, signal, sys
import tests.spill.without_torch
from tiered_mem.errors import Closed, SpillDirRefused
from tiered_mem.spill.folder import SpillFolder, owners, sweep
"""
_GIVE_UP = f"""
if os.getuid() == 0:
    os.setgroups([])
    os.setgid({NOBODY})
    os.setuid({NOBODY})
"""


def process(code: str, *, unprivileged: bool = False) -> CompletedProcess[str]:
    """Runs code that may use the names of _HEAD. unprivileged: not as root."""
    return run("-c", _HEAD + _GIVE_UP * unprivileged + dedent(code), cwd=ROOT)


def output_of(code: str, *, unprivileged: bool = False) -> str:
    """What the code prints."""
    done = process(code, unprivileged=unprivileged)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def common_dir() -> Iterator[Path]:
    """A directory that other users may enter, as they may not enter pytest's."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)

"""Starts jobs of several ranks, and reads what each of them has found."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from emulator.tests.launch import fork_ranks, run_ranks

HBM = ("--hbm", "2GiB")
SCHEDULES = [("eager",), ("late",), ("random", "--seed", "3")]
job = pytest.mark.slow(why="its processes import torch, and meet for each collective")


def said(
    folder: Path, ranks: int, options: tuple[str, ...], module: str, *arguments: str, **environment: str
) -> list[Any]:
    """What each rank of the module has printed as JSON, in their order."""
    return _all_lines(fork_ranks(ranks, (*HBM, *options), module, *arguments, cwd=folder, **environment), ranks)


def said_to_torchrun(
    folder: Path, ranks: int, options: tuple[str, ...], *arguments: str, **environment: str
) -> list[Any]:
    """The same of ranks that torch.distributed.run ARGUMENTS... starts, each as a process of its own."""
    return _all_lines(run_ranks(ranks, (*HBM, *options), *arguments, cwd=folder, **environment), ranks)


def _all_lines(done: subprocess.CompletedProcess[str], ranks: int) -> list[Any]:
    found = lines_of(done.stdout)
    assert len(found) == ranks, done.stderr[-3000:]
    return found


def lines_of(text: str) -> list[Any]:
    """What ranks have printed as JSON, in their order. Two may have got into one line."""
    found = []
    while text := text[text.find("{") :] if "{" in text else "":
        line, end = json.JSONDecoder().raw_decode(text)
        found.append(line)
        text = text[end:]
    return sorted(found, key=lambda line: line["rank"])

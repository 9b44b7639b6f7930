"""Reinforcement learning on two ranks: the example's bits are those without a manager, and its peaks are lower."""

from __future__ import annotations

import re
from pathlib import Path

from emulator.tests.hccl_jobs import HBM
from emulator.tests.launch import run_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "rl_ranks.py"
SMALL = ("--layers", "3", "--width", "192", "--steps", "1", "--rounds", "2")


def test_the_example(tmp_path: Path) -> None:
    done = run_ranks(2, (*HBM, "--schedule", "late"), str(EXAMPLE), *SMALL, cwd=tmp_path, COLUMNS="120")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bit-equal with and without the manager on all ranks: yes" in done.stdout
    rows = re.findall(r"^ +([01]) +(hand over|generate|train) +([\d.]+) +([\d.]+) *$", done.stdout, re.MULTILINE)
    assert [row[:2] for row in rows] == [
        (rank, name) for rank in "01" for name in ("hand over", "generate", "train")
    ]
    shares = {"hand over": 0.8, "generate": 0.5, "train": 0.85}
    for _, name, there, managed in rows:
        assert float(managed) < shares[name] * float(there), name

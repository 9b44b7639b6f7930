"""Ranks that are killed, and begun again: the training goes on as if nothing had been."""

from __future__ import annotations

import os
from pathlib import Path

from emulator.tests.hccl_jobs import said_to_torchrun
from tests.distributed.restarts import OF_AN_ATTEMPT

WORKER = ("-m", "tests.distributed.resumed")


def test_a_job_whose_ranks_are_killed_comes_to_the_plain_bits(tmp_path: Path) -> None:
    """One in a forward, another in a backward, while a checkpoint is written."""
    plain, killed = tmp_path / "plain", tmp_path / "killed"
    expected = said_to_torchrun(tmp_path, 2, (), *WORKER, str(plain), "--plain", "--steps", "8")
    restarts = ("--max-restarts", "2", "--monitor-interval", "0.1")
    found = said_to_torchrun(
        tmp_path, 2, (), *restarts, *WORKER, str(killed), "--deaths", "2", "--steps", "8", **OF_AN_ATTEMPT
    )
    for line, other in zip(found, expected, strict=True):
        assert line["digest"] == other["digest"]
        assert line["lives"] == 3
        assert line["resumed"] > 1
    assert os.listdir(killed / "spill") == []

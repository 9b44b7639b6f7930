"""Tiering under FSDP2, over the emulator's HCCL."""

from __future__ import annotations

from pathlib import Path

from emulator.tests.hccl_jobs import job, said


@job
def test_tiering_changes_no_bit_of_a_sharded_training(tmp_path: Path) -> None:
    for line in said(tmp_path, 2, ("--races",), "-m", "tests.modelled.hccl_tiering"):
        (plain, none), (tiered, moved) = line["plain"], line["tiered"]
        assert tiered == plain
        assert none == [0, 0]
        assert min(moved) > 0
        assert line["races"] == []

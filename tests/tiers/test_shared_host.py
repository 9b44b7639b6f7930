"""Ranks of one machine that need different parts of its host memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from emulator.tests.hccl_jobs import job, said

pytestmark = pytest.mark.once(why="its processes have a schedule of their own")

MIB = 1 << 20
WORKER = "tests.tiers.shared_host_worker"
PARTS = (4, 2, 1, 1)


@job
def test_who_needs_more_host_memory_has_it_from_those_who_need_less(tmp_path: Path) -> None:
    """All need 128 MiB together, which is there for the first time where nobody keeps an equal part for itself."""
    lines = said(tmp_path, len(PARTS), (), WORKER, "shared", "equal", TIERED_MEM_HOST_LIMIT="256MiB")
    for parts, line in zip(PARTS, lines, strict=True):
        shared, equal = line["shared"], line["equal"]
        assert shared["right"]
        assert equal["right"]
        assert shared["kept"] == 0
        assert equal["kept"] > 0 if parts == 4 else equal["kept"] == 0
        assert shared["node.own"] == shared["host.reserved.current"] == parts * 16 * MIB
        assert shared["node.used"] == shared["node.bytes"] == shared["host.capacity"] == 128 * MIB
        assert (shared["node.ranks"], shared["node.floor"]) == (4, 8 * MIB)
        assert "host of all ranks / limit     128.0 MiB / 128.0 MiB: 4 ranks, this one" in shared["summary"]
        assert "node.bytes" not in equal

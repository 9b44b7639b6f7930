"""accelerate with FSDP2 on two emulated NPUs, which talk over HCCL."""

from __future__ import annotations

from pathlib import Path

import pytest

from emulator.tests.hccl_jobs import said
from tests.conftest import EMULATED

pytest.importorskip("accelerate", reason="make test-integrations installs it")

pytestmark = [
    pytest.mark.slow(why="two ranks import accelerate"),
    pytest.mark.skipif(not EMULATED, reason="two devices are emulated"),
]


def test_a_sharded_training_is_the_plain_one_and_resumes_in_all_directions(tmp_path: Path) -> None:
    for line in said(tmp_path, 2, (), "tests.integrations.fsdp2_worker", str(tmp_path)):
        for registered in ("before", "after"):
            assert line[registered] == line["plain"]
            assert line[f"{registered} goes on"] == line["plain goes on"]
            assert line[f"{registered} moved"] > 0
        for how in ("cheap", "full"):
            assert line[how] == [line["plain"], line["plain goes on"]]
            # The first layer's input wants no gradient.
            assert sorted(line[f"{how} treated"]) == [[None, 1], [None, 3]]
        for direction in ("plain to plain", "plain to after", "after to plain", "after to after"):
            assert line[direction] == line["plain goes on"], direction
        assert "are not the model's any more" in line["made before"]
        assert "CPUOffloadPolicy" in line["cpu offload"]
        assert "register_optimizer" in line["cpu offload"]

"""Replays of a graph take the same modelled time in a dry run, and in each schedule."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from emulator.tests.launch import EMULATOR, run, write_script

pytestmark = [
    pytest.mark.once(why="its processes have a schedule of their own"),
    pytest.mark.slow(why="four processes import torch"),
]

SCRIPT = """
    import json
    import ascend_emulator, torch
    from torch import nn

    model = nn.Sequential(nn.Linear(64, 128), nn.Dropout(0.1), nn.GELU(), nn.Linear(128, 64)).npu()
    x = torch.randn(16, 64, device="npu")
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        model(x).square().mean().backward()
    torch.npu.synchronize()
    with ascend_emulator.record_timeline() as spans:
        for _ in range(3):
            graph.replay()
        torch.npu.synchronize()
    told = [[span.name, span.stream, span.nbytes, round((span.end - spans[0].start) * 1e9)] for span in spans]
    print(json.dumps([told, torch.npu.max_memory_allocated()]))
"""


def test_replays_take_the_same_time_in_a_dry_run_and_in_each_schedule(tmp_path: Path) -> None:
    script = write_script(tmp_path, SCRIPT)
    found = []
    for options in (["--dry"], [], ["--schedule", "late", "--races"], ["--schedule", "random"]):
        done = run(*EMULATOR, "--clock", "910b3", *options, script, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    spans, peak = found[0]
    assert found == [found[0]] * 4
    assert peak > 0
    assert [span[0] for span in spans].count("aclnnDropoutGenMaskV2Tensor") == 3

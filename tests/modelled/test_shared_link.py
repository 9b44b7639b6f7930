"""The link of ranks that share their host's memory, on the modelled clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.shared_link.links import BACK, MEASURED, OUT, shared
from emulator.tests.hccl_jobs import job
from emulator.tests.launch import EMULATOR, ROOT, run, run_ranks, write_script

CLOCK = ("--clock", "910b3", "--dry")
MEMORY = 30_000_000_000
PROBE = """
    import json, sys
    import ascend_emulator, torch
    from tiered_mem.device.device import Device
    from tiered_mem.tiers.measure import measured_link
    from tiered_mem.tiers.pinning import pinned_slab
    device = Device("npu")
    with pinned_slab(device, 32 << 20) as (_, on_host):
        said = []
        for beside in (0.0, 0.05):
            began = ascend_emulator.now()
            link = measured_link(device, on_host, rounds=3, beside=beside)
            said.append([ascend_emulator.now() - began, link.out, link.back, link.both])
    print(json.dumps(said))
"""


def test_where_others_measure_too_it_goes_on_for_as_long_as_is_said(tmp_path: Path) -> None:
    done = run(*EMULATOR, *CLOCK, write_script(tmp_path, PROBE), cwd=tmp_path, pythonpath=ROOT)
    assert done.returncode == 0, done.stderr
    (short, *alone), (long, *beside) = json.loads(done.stdout.splitlines()[-1])
    assert short < 0.05 <= long < 0.1
    assert beside == pytest.approx(alone, rel=1e-3)


@job
def test_after_three_steps_a_rank_knows_its_share(tmp_path: Path) -> None:
    numbers = map(str, (4, 4, 4096, 7 << 30, MEMORY))
    arguments = ("-m", "benchmarks.shared_link.child", MEASURED, *numbers)
    options = (*CLOCK, "--hbm", "64GiB", "--host-memory", str(MEMORY))
    done = run_ranks(2, options, *arguments, cwd=tmp_path, TORCH_HCCL_ASYNC_ERROR_HANDLING="0")
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    first, *_, last = said["links"]
    share = shared(2, MEMORY)
    # It was measured before any meeting: alone.
    assert [first["out"], first["back"]] == pytest.approx([OUT, BACK], rel=0.05)
    assert [last["out"], last["back"]] == pytest.approx([share["out"], share["back"]], rel=0.05)

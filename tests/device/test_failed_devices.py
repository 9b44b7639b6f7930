"""After a failure torch_npu's queue drops all work of the process. Nobody may wait for it, or take it for done."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from emulator.tests.launch import EMULATOR, run, write_script
from tests.conftest import EMULATED

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not EMULATED, reason="only the emulated runtime can be told to fail")

SCRIPT = """
    import faulthandler
    import sys
    from pathlib import Path

    import ascend_emulator
    import torch
    from tests.models import is_right_step, stack
    from tiered_mem import TieringManager

    faulthandler.dump_traceback_later(400, exit=True)

    def manager(**options):
        return TieringManager(policy="layer-order", device="npu", preallocate=False, **options)

    def tell(what, call):
        try:
            print(what, call())
        except RuntimeError as error:
            print(what, type(error).__name__, str(error).splitlines()[0])

    def fail():
        ascend_emulator.inject("aclrtMemcpyBatchAsync:1")
        try:
            is_right_step(first, "npu")
        finally:
            ascend_emulator.clear_faults()

    def tiered(residency):
        params = [torch.nn.Parameter(torch.ones(1000, device="npu")) for _ in range(8)]
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer = spilling.register_optimizer(
            torch.optim.AdamW(params), bucket_bytes="16KiB", residency=residency
        )
        optimizer.step()
        return optimizer

    folder = Path(sys.argv[1])
    first, small = manager(host_bytes="16MiB"), manager(host_bytes="4MiB")
    spilling = manager(host_bytes="8MiB", spill_dir=folder, spill_bytes="64MiB", trace=True)
    model = torch.nn.Linear(512, 512).npu()
    states = {residency: tiered(residency) for residency in ("host", "disk", "device-until-offload")}
    print(is_right_step(small, "npu"), is_right_step(spilling, "npu"))

    tell("the step that fails:", fail)
    for attempt in range(2):
        tell("a full host:", lambda: [is_right_step(small, "npu") for _ in range(3)])
    tell("a module:", lambda: spilling.offload(model))
    print(tuple(model.weight.shape), spilling.stats()["parked.bytes.current"])
    tell("states in a phase:", lambda: spilling.offload(states["device-until-offload"]))
    for residency in ("host", "disk"):
        tell(f"a step of states on {residency}:", states[residency].step)
        tell(f"a checkpoint of states on {residency}:", states[residency].state_dict)
    tell("a step that spills:", lambda: [is_right_step(spilling, "npu") for _ in range(3)])
    tell("synchronize:", spilling.synchronize)
    tell("the summary:", spilling.memory_summary)
    for attempt in range(2):
        tell("close:", spilling.close)
    print("files left:", [path for path in folder.rglob("*") if path.is_file()])
    """


@pytest.mark.slow(why="a process imports torch, and loses its device")
def test_nobody_waits_for_work_that_was_dropped(tmp_path: Path) -> None:
    folder = tmp_path / "spill"
    folder.mkdir()
    script = write_script(tmp_path, dedent(SCRIPT))
    result = run(*EMULATOR, script, str(folder), cwd=tmp_path, pythonpath=ROOT, TASK_QUEUE_ENABLE="1")
    assert result.returncode == 0, result.stdout + result.stderr
    dropped = "DeviceFailed a copy was dropped, because work before it failed on the device."
    before, failure, *lines = [line.partition(" The error of that work")[0] for line in result.stdout.splitlines()]
    assert before == "True True"
    assert failure.endswith("the current working operator name is aclrtMemcpyBatchAsync.")
    assert lines == [
        f"a full host: {dropped}",
        f"a full host: {dropped}",
        f"a module: {dropped}",
        "(512, 512) 0",
        f"states in a phase: {dropped}",
        # As of an optimizer that is not tiered: its kernels are dropped as well, and nobody hears of it.
        "a step of states on host: None",
        f"a checkpoint of states on host: {dropped}",
        "a step of states on disk: None",
        f"a checkpoint of states on disk: {dropped}",
        f"a step that spills: {dropped}",
        f"synchronize: {dropped}",
        f"the summary: {dropped}",
        f"close: {dropped}",
        f"close: {dropped}",
        "files left: []",
    ]

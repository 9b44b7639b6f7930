"""A training whose disk tier takes the time of the emulator's modelled drive."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from emulator.tests.launch import ROOT
from emulator.tests.test_modelled_drives import SCHEDULES, output_of
from emulator.tests.timed import SERVER, machine

Said = dict[str, Any]

TRAINING = """
    import json
    from pathlib import Path
    import ascend_emulator
    import torch
    from tests.models import stack
    from tiered_mem import TieringManager
    from tiered_mem.policies import LRUPolicy

    def train(manager=None):
        model, x = stack(4, "npu")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        forward = model
        if manager is not None:
            forward = manager.offload_context(model.layers, min_bytes=1024)(lambda x: model(x))
            optimizer = manager.register_optimizer(optimizer, bucket_bytes="64KiB", residency="disk")
        losses, times = [], []
        for _ in range(2):
            loss = forward(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item().hex())
            times.append(ascend_emulator.now())
        return losses, [parameter.detach().cpu() for parameter in model.parameters()], times

    losses, weights, _ = train()
    Path("spill").mkdir(exist_ok=True)
    with ascend_emulator.record_timeline() as spans:
        tiers = {"host_bytes": "6MiB", "spill_dir": "spill", "spill_bytes": "64MiB"}
        with TieringManager(policy=LRUPolicy("4MiB"), device="npu", trace=True, **tiers) as manager:
            tiered, others, times = train(manager)
        torch.npu.synchronize()
    manager.export_trace("trace.json")
    trace = json.loads(Path("trace.json").read_text())["traceEvents"]
    print(json.dumps({
        "equal": tiered == losses and all(map(torch.equal, weights, others)),
        "times": times,
        "spans": spans,
        "files": [span for span in trace if span["name"] in ("write", "read") and span["ph"] == "X"],
        "stats": manager.stats(),
    }))
"""
OFFER = '[project.entry-points."tiered_mem.drives"]\nascend_emulator = "ascend_emulator.drives:offered_drive"\n'


def offer(folder: Path) -> None:
    """Has scripts of that folder find the drive as an installed emulator's, however this one was installed."""
    assert OFFER in (ROOT / "emulator/pyproject.toml").read_text()
    about = folder / "offered-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: offered\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[tiered_mem.drives]\nit = ascend_emulator.drives:offered_drive\n")


def train(folder: Path, *options: str, server: str = SERVER) -> Said:
    folder.mkdir(exist_ok=True)
    offer(folder)
    said: Said = json.loads(output_of(folder, TRAINING, *machine(folder, server), *options))
    return said


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Said:
    return train(tmp_path_factory.mktemp("training"))


def of_drive(said: Said) -> list[tuple[str, int, float, float]]:
    return [(name, nbytes, start, end) for name, device, _, nbytes, start, end in said["spans"] if device == -1]


@pytest.mark.slow(why="a process trains a model")
def test_a_training_that_spills_has_the_plain_ones_numbers_and_the_drives_times(trained: Said) -> None:
    assert trained["equal"]
    operations = of_drive(trained)
    assert {name for name, *_ in operations} == {"drive_read", "drive_write"}
    assert (
        sum(nbytes for name, nbytes, *_ in operations if name == "drive_read")
        == trained["stats"]["disk.read.total"]
    )
    for name, nbytes, start, end in operations:
        rate = 2e9 if name == "drive_read" else 1e9
        assert end - start == pytest.approx(50e-6 + nbytes / rate, abs=2e-9)
    assert all(start >= end for (*_, end), (*_, start, _) in pairwise(operations))


@pytest.mark.slow(why="a process trains a model")
def test_the_managers_trace_tells_the_drives_times(trained: Said) -> None:
    """From another beginning, but how long each took, in the order of their kinds."""
    for kind in ("read", "write"):
        told = sorted(round(span["dur"], 1) for span in trained["files"] if span["name"] == kind)
        spans = sorted(
            round((end - start) * 1e6, 1) for name, _, start, end in of_drive(trained) if name == f"drive_{kind}"
        )
        assert told == pytest.approx(spans, abs=0.2)


@pytest.mark.slow(why="each is a process that trains a model")
@pytest.mark.parametrize("options", SCHEDULES, ids=" ".join)
def test_a_training_that_spills_is_the_same_in_each_schedule(
    tmp_path: Path, trained: Said, options: tuple[str, ...]
) -> None:
    assert train(tmp_path, *options) == trained


@pytest.mark.slow(why="two processes train a model")
def test_a_dry_training_that_spills_has_the_same_times(tmp_path: Path, trained: Said) -> None:
    dry = train(tmp_path, "--dry")
    assert dry["times"] == trained["times"]
    assert dry["spans"] == trained["spans"]
    assert dry["stats"] == trained["stats"]


LARGE = """
    from pathlib import Path
    import torch
    from tiered_mem import TieringManager
    from tiered_mem.policies import ManualPolicy
    Path("spill").mkdir()
    with TieringManager(
        policy=ManualPolicy(), device="npu", host_bytes="2GiB", spill_dir="spill", spill_bytes="1TiB"
    ) as manager:
        parameters = [torch.nn.Parameter(torch.empty(1 << 24, device="npu")) for _ in range(64)]
        optimizer = torch.optim.AdamW(parameters)
        optimizer = manager.register_optimizer(optimizer, bucket_bytes="256MiB", residency="disk")
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        manager.synchronize()
        print(manager.stats()["disk.used.current"])
        print(sum(512 * path.stat().st_blocks for path in Path("spill").rglob("*.safetensors")))
    # getrusage() would count the memory of the process that has started this one.
    print(int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10)
"""


@pytest.mark.slow(why="a process with torch")
def test_a_dry_run_spills_more_than_there_is(tmp_path: Path) -> None:
    offer(tmp_path)
    options = (*machine(tmp_path), "--dry", "--hbm", "64GiB")
    used, on_drive, memory = map(int, output_of(tmp_path, LARGE, *options).split())
    assert used >= 8 << 30
    assert on_drive < 1 << 20
    assert memory < 2 << 30


EXPOSED = """
    import ascend_emulator
    from pathlib import Path
    from tests.spill.memory import Memory, empty
    from tiered_mem.spill.disk_tier import DiskTier
    Path("spill").mkdir(exist_ok=True)
    tier = DiskTier("spill", capacity=64 << 20, drive=ascend_emulator.ModelledDrive())
    memory, back = Memory(bytes(8 << 20)), empty(8 << 20)
    for _ in range(3):
        began = ascend_emulator.now()
        record = tier.write([memory.piece("a")], step=0, kind="activation")
        record.job.wait()
        assert record.job.error is None
        written = ascend_emulator.now()
        job = tier.read(record, [(0, back.ptr)])
        job.wait()
        assert job.error is None
        print(round((written - began) * 1e9), round((ascend_emulator.now() - written) * 1e9))
    tier.close()
"""


def test_an_exposed_spill_takes_what_the_formula_says(tmp_path: Path) -> None:
    moved = (8 << 20) + 4096
    for write, read in ((1e9, 2e9), (2e9, 4e9)):
        server = SERVER.replace("= 1e9", f"= {write}").replace("= 2e9", f"= {read}")
        lines = output_of(tmp_path, EXPOSED, *machine(tmp_path, server)).splitlines()
        # Latency, bytes, and what a wait costs.
        expected = [50_000 + round(moved / rate * 1e9) + 30_000 for rate in (write, read)]
        assert lines == [" ".join(map(str, expected))] * 3

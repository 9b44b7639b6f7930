"""Each check by itself, on the device under test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import ascend_emulator
import pytest

from tests.conftest import EMULATED, KIND
from tiered_mem.check.bench import Bench
from tiered_mem.check.catalogue import catalogue
from tiered_mem.check.worker import outcome_of
from tiered_mem.device.device import Device
from tiered_mem.device.transfer import TransferEngine

pytestmark = pytest.mark.schedules("eager", why="in the others a device does nothing before the host waits for it")

CHECKS = {check.name: check for checks in catalogue().values() for check in checks}
# It leaves a device, or torch_npu's queue, that does nothing any more.
SPOILING = "a failure ends in an error"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(Device(KIND), tmp_path_factory.mktemp("drive"), quick=True)
    yield bench
    assert [path for path in bench.folder.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("name", [name for name in CHECKS if name != SPOILING])
def test_it_passes(bench: Bench, name: str) -> None:
    check = CHECKS[name]
    if KIND == "cpu" and check.on_cpu:
        pytest.skip(check.on_cpu)
    found = check.run(bench)
    assert found.verdict == "pass", found.reason


# What a fault in the copies to the device does to the trainings that get them.
TRAININGS = [
    *("offload", 'policy="auto"', "recompute, full", "recompute, cheap", "disk spill"),
    *("optimizer on the host", "optimizer on disk", "phases"),
]


one_of_many = pytest.mark.slow(why="the others differ in what they train with, and not in how they are compared")


@pytest.mark.skipif(not EMULATED, reason="only the emulated device can be told to go wrong")
@pytest.mark.parametrize(
    "name", [each if each == TRAININGS[0] else pytest.param(each, marks=one_of_many) for each in TRAININGS]
)
def test_a_training_that_comes_to_other_numbers_fails(bench: Bench, name: str) -> None:
    assert bench.plain.losses
    ascend_emulator.inject("copy_h2d:p=1")
    try:
        found = outcome_of(CHECKS[name], bench)
    finally:
        ascend_emulator.clear_faults()
    assert found.verdict == "fail"
    noticed = "NotRepeatable: " if name.startswith("recompute") else " in the plain run"
    assert noticed in found.reason or " differs in " in found.reason


@pytest.mark.skipif(KIND == "cpu", reason="a cpu has one stream")
def test_one_stream_for_both_directions_is_found(tmp_path: Path) -> None:
    bench = Bench(Device(KIND), tmp_path, quick=True)
    bench.engine = TransferEngine(bench.device, bench.device.new_stream())
    found = CHECKS["both directions at once"].run(bench)
    assert (found.verdict, found.reason) == (
        "fail",
        "no copy went the other way while copies to the host were under way",
    )


@pytest.mark.slow(why="it gives the device more and more time")
@pytest.mark.skipif(KIND == "cpu", reason="a cpu has one stream")
def test_copies_on_the_stream_that_computes_are_found(tmp_path: Path) -> None:
    bench = Bench(Device(KIND), tmp_path, quick=True)
    bench.engine = TransferEngine(bench.device, bench.device.current_stream())
    found = CHECKS["beside compute"].run(bench)
    assert (found.verdict, found.reason) == (
        "fail",
        "each copy to the host ended only after the work that was computed beside it",
    )


def test_a_check_rests_on_earlier_ones_only() -> None:
    before: set[str] = set()
    for name, check in CHECKS.items():
        assert set(check.needs) <= before
        before.add(name)
    assert list(CHECKS)[-1] == SPOILING

"""Each check by itself, on the device under test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import KIND
from tiered_mem.check.bench import Bench
from tiered_mem.check.catalogue import catalogue
from tiered_mem.device.device import Device

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


def test_a_check_rests_on_earlier_ones_only() -> None:
    before: set[str] = set()
    for name, check in CHECKS.items():
        assert set(check.needs) <= before
        before.add(name)
    assert list(CHECKS)[-1] == SPOILING

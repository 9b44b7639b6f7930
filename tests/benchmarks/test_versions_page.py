"""docs/versions.md, as it is made of files of `make matrix`, and what that installs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.matrix import ROOT, others, parts, tools, torch_of
from benchmarks.versions_page import PAGE, RESULTS, page, read, read_about

pytestmark = pytest.mark.once(why="it needs no device")


def result(torch: str, torch_npu: str | None, **counts: dict[str, int]) -> dict[str, Any]:
    return {
        "python": "3.12.1",
        "torch": torch,
        "torch_npu": torch_npu,
        "parts": [part(name, "2026-11-26", **each) for name, each in counts.items()],
    }


def part(name: str, date: str, **counts: int) -> dict[str, Any]:
    failed = [{"test": "tests/test_a.py::test_b", "outcome": "failed", "why": "it is not equal"}]
    return {"part": name, "date": date, "counts": counts, "failed": failed if counts.get("failed") else []}


def test_the_page_is_that_of_the_files() -> None:
    assert PAGE.read_text() == page(read_about(), read(RESULTS)), "make versions-page"


def test_a_row_has_the_tests_of_each_part() -> None:
    text = page("", [result("2.9.1+cpu", None, cpu={"passed": 1234, "failed": 1, "error": 1, "skipped": 5})])
    assert "| 3.12.1 | 2.9.1 | - | 2026-11-26 | 1,234 / 2 / 5 | - | - |" in text
    assert "- torch 2.9.1, tiered_mem, CPU: `tests/test_a.py::test_b`" in text


def test_parts_that_ran_on_several_days() -> None:
    found = result("2.9.1", "2.9.1", npu={"passed": 1})
    found["parts"] += [part("emulator", "2026-11-28", passed=2), part("cpu", "2026-11-27", passed=3)]
    assert "| 2.9.1 | 2026-11-26 to 2026-11-28 | 3 / 0 / 0 | 1 / 0 / 0 | 2 / 0 / 0 |" in page("", [found])


def test_a_part_that_runs_alone_leaves_the_others(tmp_path: Path) -> None:
    versions = {"python": "3.12.1", "torch": "2.9.1", "torch_npu": "2.9.1"}
    path = tmp_path / "torch-2.9.1-python-3.12.1.json"
    assert others(path, versions, "npu") == []
    path.write_text(json.dumps(result("2.9.1", "2.9.1", cpu={"passed": 1}, npu={"passed": 2})))
    assert others(path, versions, "npu") == [part("cpu", "2026-11-26", passed=1)]
    assert others(path, {**versions, "torch_npu": "2.9.1.post2"}, "npu") == []


def test_nothing_failed() -> None:
    text = page("", [result("2.14.0", "2.14.0", cpu={"passed": 1}, npu={"passed": 2}, emulator={"passed": 3})])
    assert "| 3.12.1 | 2.14.0 | 2.14.0 | 2026-11-26 | 1 / 0 / 0 | 2 / 0 / 0 | 3 / 0 / 0 |" in text
    assert "What failed" not in text


@pytest.mark.skipif(sys.version_info < (3, 11), reason="make matrix runs in Python 3.11 or newer")
def test_what_is_installed_brings_no_other_torch() -> None:
    assert {"numpy", "safetensors", "xxhash", "pytest==9.*", "hypothesis"} <= set(tools())
    assert not any(name.startswith("torch") for name in tools())


def test_the_emulator_is_tested_where_there_is_a_torch_npu() -> None:
    assert list(parts(None, quick=False)) == ["cpu"]
    assert list(parts("2.12.0", quick=False)) == ["cpu", "emulator", "npu"]


def test_the_quick_ones_are_there() -> None:
    paths = [path for paths in parts("2.12.0", quick=True).values() for path in paths]
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_a_torch_npu_names_its_torch() -> None:
    assert torch_of(Path("torch_npu-2.10.0.post7-cp312-cp312-manylinux_2_28_x86_64.whl")) == "2.10.0"
    assert torch_of(Path("torch_npu-2.14.0-cp313-cp313-manylinux_2_28_x86_64.whl")) == "2.14.0"

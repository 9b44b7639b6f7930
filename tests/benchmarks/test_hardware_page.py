"""docs/hardware.md, as it is made of files of `tiered-mem check`."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from benchmarks.hardware_page import PAGE, RESULTS, Result, page, read

pytestmark = pytest.mark.once(why="it needs no device")


def test_the_page_is_that_of_the_files() -> None:
    assert PAGE.read_text() == page(read(RESULTS)), "make hardware-page"


def test_a_page_without_a_real_device_says_so() -> None:
    examples = [result for result in read(RESULTS) if result.kind != "real"]
    assert {result.kind for result in examples} == {"emulated", "cpu"}
    assert "**No real device has been qualified yet.**" in page(examples)


def test_a_real_device_is_named_first_with_what_failed() -> None:
    results = read(RESULTS)
    emulated = next(result for result in results if result.kind == "emulated")
    found = copy.deepcopy(emulated.found)
    found["device"] |= {"name": "Ascend910B3", "runtime": "ascend-toolkit/latest/lib64/libascendcl.so"}
    found["verdicts"] = {"pass": 28, "fail": 1}
    found["checks"][0] |= {"verdict": "fail", "reason": "nothing is pinned"}
    rates = next(check for check in found["checks"] if check["name"] == "link rates")
    rates["figures"]["to_host"] = {"value": 21.5, "unit": "GB/s"}
    text = page([*results, Result(found)])
    assert "No real device" not in text
    assert "Real devices in the table: Ascend910B3, NVIDIA H100 80GB HBM3, NVIDIA H200. For another one" in text
    real, examples = text.split("## Devices")[1].split("## Examples, of no real device")
    (row,) = [line for line in real.splitlines() if line.startswith("| Ascend")]
    assert "emulated" not in row
    assert "| 28 | 1 | 0 | 21.5 GB/s |" in row
    assert "| Ascend910B1, **emulated** |" in examples
    assert f"- Ascend910B3, {found['date'][:10]}: pinned memory: nothing is pinned" in text


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(json.dumps({"schema": 1}))
    with pytest.raises(ValueError, match=r"other\.json is not what tiered-mem check writes"):
        read(tmp_path)


def test_rates_that_were_not_run_are_left_out() -> None:
    found = copy.deepcopy(next(result for result in read(RESULTS) if result.kind == "emulated").found)
    next(check for check in found["checks"] if check["name"] == "link rates")["figures"] = {}
    assert page([Result(found)]).count("| - | - | - | - / - |") == 1

"""The study of published steps: its rows can be read, a small one runs, and a row is held out of its own fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ascend_emulator.machines import parse_chip

from benchmarks.published.kernels import KERNELS
from benchmarks.published.optimizers import OPTIMIZERS
from benchmarks.published.rows import Row, read_rows
from benchmarks.published.shapes import SHAPES
from benchmarks.published.study import Result, compare, fit
from benchmarks.published.traffic import LINKS
from emulator.tests.launch import EMULATOR, ROOT, run, write_script

pytestmark = pytest.mark.once(why="its processes have a schedule of their own")

SMALL = """
    import json
    from dataclasses import replace
    from benchmarks.published.rows import Row
    from benchmarks.published.step import modelled_seconds

    row = Row("tiny", "910b2", "nowhere", 1, model="tiny", kernels="megatron", optimizer="megatron",
              sequence=2048, micro_batch=4, accumulate=4, cards=8)
    print(json.dumps({
        "plain": modelled_seconds(row),
        "recompute": modelled_seconds(replace(row, recompute=True)),
        "stages": modelled_seconds(replace(row, pipeline=2)),
        "fsdp": modelled_seconds(replace(row, model="tiny-gpt", kernels="composer", optimizer="fsdp")),
    }))
"""


def test_all_rows_can_be_read_and_name_what_there_is() -> None:
    rows = read_rows()
    assert len({(row.chip, row.name) for row in rows}) == len(rows) > 30
    for row in rows:
        assert parse_chip(row.chip) == row.chip
        assert row.source.startswith("https://")
        assert row.milliseconds > 0
        if not row.host_bound:
            assert row.model in SHAPES
            assert row.kernels in KERNELS
            assert row.optimizer in OPTIMIZERS
            assert row.chip in LINKS


def test_a_row_without_a_time_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.toml"
    file.write_text('[[group]]\nchip = "a100"\nsource = "https://"\nrow = [{name = "timeless"}]\n')
    with pytest.raises(ValueError, match="timeless: neither milliseconds nor tokens_per_s"):
        read_rows(file)


@pytest.mark.slow(why="a process that trains")
def test_small_steps_run(tmp_path: Path) -> None:
    script = write_script(tmp_path, SMALL)
    done = run(*EMULATOR, "--clock", "910b2", "--dry", script, cwd=tmp_path, pythonpath=ROOT)
    assert done.returncode == 0, done.stderr
    seconds = json.loads(done.stdout)
    assert seconds["plain"] < seconds["recompute"] < 1.5 * seconds["plain"]
    assert 0 < seconds["stages"] < seconds["plain"]
    assert seconds["fsdp"] > 0


def test_a_row_is_held_out_of_its_own_fit() -> None:
    row = Row("step", "a100", "nowhere", 100.0)
    results = [Result(row, 80.0), Result(row, 80.0), Result(row, 50.0)]
    assert fit(results[:2]) == pytest.approx(1.25)
    errors = [each.calibrated for each in compare(results)]
    # The first two are thought to take 80 * sqrt(1.25 * 2), the third 50 * 1.25.
    assert errors == pytest.approx([100 / (80 * 2.5**0.5) - 1] * 2 + [100 / (50 * 1.25) - 1])

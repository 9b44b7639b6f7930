from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Command
from tests.pictures.sample import write
from tiered_mem.pictures.page import page
from tiered_mem.pictures.timeline import Timeline


def test_a_page_is_made_of_a_trace(command: Command, tmp_path: Path) -> None:
    trace = write(tmp_path / "step.json")
    done = command("report", trace)
    assert (done.status, done.err) == (0, "")
    assert done.out.splitlines()[0] == f"{tmp_path / 'step.html'}: npu:0, steps 1 to 2 of 2: 1800.0 ms"
    assert (tmp_path / "step.html").read_text(encoding="utf-8") == page(Timeline.read(trace).last(2))


def test_a_file_and_a_number_of_steps_may_be_given(command: Command, tmp_path: Path) -> None:
    made = tmp_path / "report.html"
    done = command("report", write(tmp_path / "step.json"), "-o", made, "--steps", 1, "--json")
    found = json.loads(done.out)
    assert (found["file"], found["shown"]) == (str(made), "npu:0, step 2 of 2: 800.0 ms")
    assert "<h1>npu:0, step 2 of 2: 800.0 ms</h1>" in made.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("about", "options", "why"),
    [
        ({"schema": 1}, [], "step.json cannot be shown: it is a trace of version 1, and this tiered_mem shows"),
        ({}, ["--steps", "0"], "at least 1 step is to be shown, not 0"),
        ({}, ["-o", "/nowhere/step.html"], "No such file or directory: '/nowhere/step.html'"),
    ],
)
def test_what_cannot_be_made_is_one_line(
    command: Command, tmp_path: Path, about: dict[str, object], options: list[str], why: str
) -> None:
    done = command("report", write(tmp_path / "step.json", **about), *options)
    assert (done.status, done.out) == (2, "")
    assert why in done.err
    assert done.err.startswith("tiered-mem: ")
    assert done.err.count("\n") == 1
    assert not (tmp_path / "step.html").exists()

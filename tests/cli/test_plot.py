from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Command
from tests.pictures.sample import write


def test_the_last_steps_of_a_trace_are_drawn(command: Command, tmp_path: Path) -> None:
    trace = write(tmp_path / "step.json")
    done = command("plot", trace)
    assert (done.status, done.err) == (0, "")
    assert done.out.splitlines()[0] == f"{tmp_path / 'step.png'}: npu:0, steps 1 to 2 of 2: 1800.0 ms"
    assert done.out.splitlines()[1].startswith("Device memory is that where layers begin and end")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_and_a_number_of_steps_may_be_given(command: Command, tmp_path: Path) -> None:
    picture = tmp_path / "other.svg"
    done = command("plot", write(tmp_path / "step.json"), "-o", picture, "--steps", 1, "--json")
    found = json.loads(done.out)
    assert (found["file"], found["shown"]) == (str(picture), "npu:0, step 2 of 2: 800.0 ms")
    assert "step 2 of 2" in picture.read_text()
    assert not (tmp_path / "step.png").exists()


@pytest.mark.parametrize(
    ("about", "options", "why"),
    [
        ({"schema": 1}, [], "step.json cannot be shown: it is a trace of version 1, and this tiered_mem shows"),
        ({"records": []}, [], "step.json cannot be shown: no layer was recorded"),
        (
            {},
            ["-o", "step.pdf"],
            "a picture is written to a file whose name ends in .png or .svg, not to 'step.pdf'",
        ),
        ({}, ["--steps", "0"], "at least 1 step is to be shown, not 0"),
        ({}, ["--steps", "two"], "argument --steps: invalid int value: 'two'"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(
    command: Command, tmp_path: Path, about: dict[str, object], options: list[str], why: str
) -> None:
    done = command("plot", write(tmp_path / "step.json", **about), *options)
    assert (done.status, done.out) == (2, "")
    assert why in done.err
    assert done.err.startswith("tiered-mem: ")
    assert done.err.count("\n") == 1
    assert not (tmp_path / "step.png").exists()


def test_a_trace_that_is_not_there_is_one_line(command: Command, tmp_path: Path) -> None:
    done = command("plot", tmp_path / "missing.json")
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert "No such file" in done.err


def test_without_matplotlib_it_is_one_line(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = command("plot", write(tmp_path / "step.json"))
    assert (done.status, done.out) == (2, "")
    assert done.err == (
        "tiered-mem: pictures are drawn by the package matplotlib: pip install 'tiered_mem[plot]'\n"
    )

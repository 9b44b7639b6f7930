"""README's pictures show what was measured."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pictures.__main__ import (
    BUDGET,
    GIB,
    LINKS,
    PLANNED,
    ROOT,
    STEPS,
    TOKENS,
    WAYS,
    budgets,
    memory,
    outline,
)
from tests.conftest import EMULATED


@pytest.mark.once(why="it needs no device")
def test_the_times_within_budgets_are_those_of_the_results() -> None:
    planned = json.loads(PLANNED.read_text())
    for axes, link in zip(budgets(planned).axes, LINKS, strict=True):
        (found,) = (each for each in planned if (each["model"], each["link"]) == ("llama-7b", link))
        lines = dict(zip([*WAYS, "plain"], axes.get_lines(), strict=True))
        for row, x, y in zip(found["rows"], *lines["auto"].get_data(), strict=True):
            assert x == row["budget"] / GIB
            assert y == row["auto"]["seconds"] / found["plain"]["seconds"]
            assert row["auto"]["peak"] <= row["budget"]
        # Where a way cannot keep a budget there is no point.
        assert len(lines["selective"].get_xdata()) == 2
        assert {text.get_text() for text in axes.texts} == {"plain", *(name for name, _ in WAYS.values())}


@pytest.mark.once(why="it needs no device")
def test_a_step_is_drawn_with_its_peak_and_its_time() -> None:
    plain = {"times": [0.0, 1.0, 2.0, 2.5], "bytes": [50 * GIB, 90 * GIB, 60 * GIB]}
    tiered = plain | {"bytes": [50 * GIB, 59 * GIB, 40 * GIB], "parts": {"backward": 1.0, "optimizer": 2.0}}
    (axes,) = memory(plain, tiered).axes
    texts = {text.get_text() for text in axes.texts}
    assert {"plain: 90.0 GiB, 2.50 s", "tiered: 59.0 GiB, 2.50 s", f"device_budget = {BUDGET} GiB"} <= texts


@pytest.mark.once(why="it needs no device")
def test_an_outline_is_never_below_what_it_stands_for() -> None:
    sizes = [float(number * 7 % 100) for number in range(5000)]
    times = [number / 5000 for number in range(5001)]
    coarse, most = outline(times, sizes)
    assert 300 < len(most) <= 400
    assert (coarse[0], coarse[-1], len(coarse)) == (times[0], times[-1], len(most) + 1)
    assert max(most) == max(sizes)
    at = 0
    for begin, size in zip(times, sizes, strict=False):
        while coarse[at + 1] <= begin:
            at += 1
        assert size <= most[at]


@pytest.mark.once(why="it needs no device")
def test_the_readme_says_what_is_drawn() -> None:
    drawn = (ROOT / "docs/pictures/memory.svg").read_text()
    said = " ".join((ROOT / "README.md").read_text().split())
    plain, tiered = (re.search(f"<!-- {way}: (.*) GiB, (.*) s -->", drawn) for way in ("plain", "tiered"))
    assert plain is not None
    assert tiered is not None
    assert f"Plain it rises to {plain[1]} GiB, and the step takes {plain[2]} s." in said
    assert f"it stays at {tiered[1]} GiB, and the step takes {tiered[2]} s." in said


def trained(*options: object) -> dict[str, Any]:
    """What a training in a process of its own says in the end."""
    command = [sys.executable, "-m", "benchmarks.pictures.child", *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.slow(why="a process makes fifteen steps of Llama 2 7B")
@pytest.mark.skipif(not EMULATED, reason="it needs the emulated NPU")
@pytest.mark.schedules("eager", why="it starts a process of its own, which has its schedule")
def test_the_step_that_is_drawn_is_as_fast_as_any_before(tmp_path: Path) -> None:
    """Optimizer states stay on the device from the tenth on. Shorter steps are no reason to choose anew then."""
    seconds = trained("tiered", TOKENS, BUDGET, STEPS["tiered"], tmp_path / "picture.png")["seconds"]
    assert seconds[-1] <= 1.01 * min(seconds)


@pytest.mark.slow(why="a process makes three steps of Llama 2 7B")
@pytest.mark.skipif(not EMULATED, reason="it needs the emulated NPU")
@pytest.mark.schedules("eager", why="it starts a process of its own, which has its schedule")
def test_the_memory_over_a_step_is_torchs(tmp_path: Path) -> None:
    found = trained("plain", 512, 60, 3, tmp_path / "none")
    assert len(found["times"]) == len(found["bytes"]) + 1
    assert 0 < found["parts"]["backward"] < found["parts"]["optimizer"] < found["times"][-1]
    # Weights, gradients and states of 6.7e9 parameters in bfloat16, and little more with so few tokens.
    assert 4 * 6.7e9 * 2 < max(found["bytes"]) < 1.2 * 4 * 6.7e9 * 2
    # To look costs no time of the device's.
    assert found["times"][-1] == pytest.approx(found["seconds"][-2], rel=0.02)

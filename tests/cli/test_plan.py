"""tiered-mem plan: a script that trains is recorded in a dry run, tried with the budget, and planned for others."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from emulator.tests.launch import run
from tests.cli.conftest import Command
from tests.conftest import KIND
from tests.manager.test_report import TRAIN
from tiered_mem.cli import plan as verb

ADAM = """
import sys, torch
from torch import nn
from tiered_mem import TieringManager

with torch.device("npu"):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048), nn.Tanh()) for _ in range(8)))
    x = torch.zeros(8192, 2048)
with TieringManager(device="npu", host_bytes="4GiB") as manager, manager.attach(model):
    optimizer = manager.register_optimizer(torch.optim.AdamW(model.parameters()), residency="auto")
    for step in range(int(sys.argv[1])):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
OPTIONS = ("--chip", "910b3", "--budget", "2GiB")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--budget", "1GiB", "train.py"], "the following arguments are required: --chip"),
        (["--chip", "910b3", "--budget", "much", "train.py"], "'much' is not a size"),
        ([*OPTIONS], "the following arguments are required: SCRIPT"),
        ([*OPTIONS, "--steps", "2", "train.py"], "--steps is at least 3, not 2"),
    ],
)
def test_what_cannot_be_planned_is_one_line(command: Command, arguments: list[str], said: str) -> None:
    done = command("plan", *arguments)
    assert (done.status, done.out) == (2, "")
    assert said in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("missing", ["ascend_emulator", "matplotlib"])
def test_what_is_not_installed_is_said_with_how_to_get_it(
    command: Command, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setattr(verb, "find_spec", lambda name: None if name == missing else find_spec("json"))
    done = command("plan", *OPTIONS, "--plot", "sweep.png", "train.py")
    assert (done.status, done.out) == (2, "")
    assert {"ascend_emulator": "pip install ./emulator", "matplotlib": "pip install matplotlib"}[
        missing
    ] in done.err


@pytest.mark.skipif(KIND != "npu", reason="it runs on the emulated NPU, which need not be installed")
def test_a_wrong_script_or_chip_is_found_before_anything_starts(command: Command, tmp_path: Path) -> None:
    script, wrong = tmp_path / "train.py", tmp_path / "wrong.py"
    script.write_text(f"open({str(tmp_path / 'started')!r}, 'w')")
    wrong.write_text("x = = 1")
    for options, said in (
        ([*OPTIONS, tmp_path / "none.py"], "none.py cannot be run: No such file or directory"),
        ([*OPTIONS, tmp_path], "cannot be run: Is a directory"),
        ([*OPTIONS, wrong], "wrong.py cannot be run: invalid syntax"),
        (["--chip", "910b9", "--budget", "2GiB", script], "'910b9' is no chip; known are"),
        ([*OPTIONS, "--server", "mine", script], "'mine' is no server; known are"),
    ):
        done = command("plan", *options)
        assert (done.status, done.out) == (2, "")
        assert said in done.err
        assert done.err.count("\n") == 1
    assert not (tmp_path / "started").exists()


@pytest.mark.slow(why="the script runs twice")
def test_a_training_is_planned(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN.replace("range(6)", "range(int(sys.argv[2]))"))

    def planned(budget: str, *arguments: str, status: int = 0) -> tuple[str, str]:
        command = ("-m", "tiered_mem", "plan", "--chip", "910b3", "--budget", budget)
        done = run(*command, *arguments, cwd=tmp_path, pythonpath=Path.cwd())
        assert done.returncode == status, done.stderr
        return done.stdout, done.stderr

    out, _ = planned("1900MiB", "--json", "--sweep", "--hbm", "4GiB", str(script), "1GiB", "100")
    found = json.loads(out)
    assert found["problem"] == ""
    assert found["report"]["budget"] == 1900 << 20  # and not what the script says
    assert found["report"]["measured_peak"] <= 1900 << 20
    budgets = [row["budget"] for row in found["sweep"]]
    assert [row["budget_bytes"] for row in found["sweep"]] == budgets
    assert budgets == sorted(budgets)
    assert 1900 << 20 in budgets
    assert all(row["peak"] <= row["budget"] and row["least"] <= row["seconds"] for row in found["sweep"])
    assert found["sweep"][-1]["moved"] == 0 < found["sweep"][0]["moved"]
    for row in found["sweep"]:
        others = [row[name] for name in ("plain", "checkpointed", "moving") if row[name] is not None]
        assert row["seconds"] <= 1.01 * min(others)
    assert found["sweep"][-1]["plain"] == found["sweep"][-1]["seconds"]
    assert found["sweep"][0]["plain"] is None
    assert any(row["mix"] for row in found["sweep"])
    out, _ = planned("1900MiB", "--hbm", "4GiB", str(script), "1GiB", "5")
    assert "the step within budgets, as planned" in out
    assert "5 steps were too few to try how layers are computed again" in out
    out, err = planned("100MiB", str(script), "1GiB", "100", status=1)
    assert "the budget of 100.0 MiB is below" in out
    assert "trying the plan" not in err
    _, err = planned("1900MiB", str(script), "1GiB", "1", status=2)
    assert "train.py has failed in its recording, after 1 step, with exit status 1" in err.splitlines()[-1]


@pytest.mark.slow(why="a script runs twice")
def test_a_training_whose_optimizer_states_come_to_stay_is_planned(tmp_path: Path) -> None:
    """Nor does it ask the device for any number, so that it is ahead of it."""
    (tmp_path / "train.py").write_text(ADAM)
    command = (
        "-m",
        "tiered_mem",
        "plan",
        "--chip",
        "910b3",
        "--budget",
        "1500MiB",
        "--hbm",
        "4GiB",
        "--json",
        "--sweep",
    )
    done = run(*command, "train.py", "100", cwd=tmp_path, pythonpath=Path.cwd())
    assert done.returncode == 0, done.stderr
    assert "tiered-mem: recording" in done.stderr
    found = json.loads(done.stdout)
    report, sweep = found["report"], found["sweep"]
    assert report["step"] >= 2
    assert report["measured_peak"] <= 1500 << 20
    asked = next(row for row in sweep if row["budget"] == 1500 << 20)
    assert asked["states_kept"] == report["states_kept"]
    assert asked["seconds"] == pytest.approx(report["planned"], rel=0.05)
    assert all(row["peak"] <= row["budget"] and row["least"] <= row["seconds"] for row in sweep)
    assert sweep[-1]["moved"] == 0
    assert sweep[0]["states_kept"] < sweep[-1]["states_kept"]
    done = run(*command, "train.py", "3", cwd=tmp_path, pythonpath=Path.cwd())
    assert done.returncode == 2
    said = "train.py has ended after 3 steps, and optimizer states came to the device or left it in all of them"
    assert said in done.stderr.splitlines()[-1]


@pytest.mark.slow(why="it draws")
def test_the_sweep_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    picture = tmp_path / "sweep.png"
    options = ("--chip", "910b3", "--budget", "1900MiB", "--hbm", "4GiB", "--plot", str(picture))
    done = run("-m", "tiered_mem", "plan", *options, str(script), cwd=tmp_path, pythonpath=Path.cwd())
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")

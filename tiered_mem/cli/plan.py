"""Plan a training for a device that is not here: what fits, how long a step takes, what it waits for.

Runs SCRIPT, which trains with TieringManager(policy="auto"), on the emulated NPU in dry runs: memory is counted and
time is modelled, nothing is computed, and no device is needed. The first run has all the memory that it wants, and
is recorded. The second one has the budget, and tries the plan. Each is ended after STEPS steps, or after more where
optimizer states have not come to rest by then, by an exception out of the forward that would begin the next one;
`with` and `finally` blocks run. What the script saves is all zeros, so let it save to another place. Options come
before SCRIPT; what comes after it is the script's. The exit status is 1 if the training does not fit.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..policies.planning import BudgetTooSmall, Link, Profile, plan
from ..policies.planning.advice import moved
from ..policies.planning.disk_and_states import StatesShare, explained, states_to_keep
from ..policies.planning.profile import floor
from ..rehearsal import MOST, VARIABLE
from ..sizes import format_bytes, format_seconds, parse_bytes
from .output import console, plain, size, table, write_json

_EMULATOR = "ascend_emulator"
# Of the device, beside the budget: torch's allocator has memory in pieces that nobody can use.
_FRAGMENTS = 0.04
_POINTS = 8
# Of a device that has room for everything: nothing is behind the memory of a dry run.
_AMPLE = 1 << 42
_NEEDED = (
    "It has to train at least 3 steps: the first is recorded, and one that went by the plan is measured when the "
    'next begins; with residency="auto" it takes one or two more'
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "tiered-mem plan --chip CHIP --budget SIZE [OPTIONS] SCRIPT [ARGS...]"
    parser.add_argument("--chip", required=True, help="the modelled chip, such as 910b3 or h100, or FILE.toml")
    parser.add_argument("--budget", required=True, type=size, help="device memory for everything, such as 60GiB")
    parser.add_argument("--server", help="whose host link the chip has, a name or FILE.toml (the chip's usual one)")
    parser.add_argument("--hbm", type=size, help="all of the device's memory (the budget, and 4 %% for fragments)")
    parser.add_argument("--host", type=size, default="512GiB", help="the server's host memory (512GiB)")
    parser.add_argument(
        "--steps",
        type=int,
        default=4,
        help="how many are made in a run, at least 3 (4); up to 4 times as many where that takes it",
    )
    parser.add_argument("--sweep", action="store_true", help="plan for other budgets too")
    parser.add_argument("--plot", metavar="FILE.png", type=Path, help="draw the sweep; it takes matplotlib")
    parser.add_argument("script", metavar="SCRIPT", help="a Python file")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="the script's own")


def run(options: argparse.Namespace) -> int:
    if options.steps < 3:
        raise ValueError(
            f"--steps is at least 3, not {options.steps}: one is recorded, one planned, one measures it"
        )
    if find_spec(_EMULATOR) is None:
        raise ValueError(
            f"the script runs on the emulated NPU, and {_EMULATOR} is not installed here: in a checkout of "
            f"tiered_mem, `make -C emulator PYTHON={sys.executable}` and `pip install ./emulator`"
        )
    if options.plot is not None and find_spec("matplotlib") is None:
        raise ValueError("--plot takes matplotlib, which is not installed: pip install matplotlib, or use --sweep")
    _check(options)
    status, ample = _rehearse(options, "recording", _AMPLE, _AMPLE // 2)
    if status:
        raise ValueError(
            f"{options.script} has failed in its recording, after {_steps(ample)}, with exit status {status}. It "
            "says above what went wrong"
        )
    _complete(options, ample)
    step, link = Profile(**ample["step"]), Link(**ample["link"])
    problem, report, text = _try(options, step, link, ample["names"])
    states = StatesShare(**ample["states"])
    plans = _sweep(step, link, states, options.budget) if options.sweep or options.plot is not None else []
    if options.plot is not None:
        _draw(plans, options)
    if options.json:
        write_json({"problem": problem, "report": report, "sweep": plans})
    else:
        _show(problem or text, plans, options, fits=not problem)
    return 1 if problem else 0


def _try(options: argparse.Namespace, step: Profile, link: Link, names: Sequence[Any]) -> tuple[str, Any, str]:
    """Runs the script with the budget. What is wrong, if anything is; the report for programs, and for people."""
    try:
        plan(step, options.budget, link)
    except BudgetTooSmall as error:
        return str(explained(error, step, names)), None, ""
    hbm = options.hbm or int(options.budget / (1 - _FRAGMENTS)) + 1
    status, found = _rehearse(options, "trying the plan", hbm, options.budget)
    if status:
        return (
            f"with a budget of {format_bytes(options.budget)}, on a device of {format_bytes(hbm)}, the script "
            "ended as it says above. Where that is for want of memory: give a smaller budget, or say by --hbm how "
            "much the device has",
            None,
            "",
        )
    _complete(options, found)
    return found["problem"], found["report"], found["text"]


def _check(options: argparse.Namespace) -> None:
    """Raises ValueError for a script that cannot run, and for what the emulator does not take."""
    try:
        compile(Path(options.script).read_bytes(), options.script, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{options.script} cannot be run: {getattr(error, 'strerror', None) or error}") from None
    command = [*_emulator(options, _AMPLE), "-c", "pass"]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise ValueError(done.stderr.strip().removeprefix(f"{_EMULATOR}: ") or f"{_EMULATOR} does not run")


def _rehearse(options: argparse.Namespace, what: str, hbm: int, budget: int) -> tuple[int, dict[str, Any]]:
    """Runs the script on a device with so much memory. Its exit status, and what it has found."""
    sys.stderr.write(f"tiered-mem: {what}, {options.steps} steps\n")
    with tempfile.TemporaryDirectory(prefix="tiered-mem-plan-") as folder:
        file = Path(folder) / "found.json"
        command = [*_emulator(options, hbm), options.script, *options.arguments]
        environment = os.environ | {VARIABLE: f"{options.steps}:{budget}:{file}"}
        environment.pop("TIERED_MEM_HOST_LIMIT", None)  # is of this machine
        done = subprocess.run(command, env=environment, stdout=sys.stderr)
        nothing = {"steps": 0, "missing": 'it made no TieringManager(policy="auto") for the device'}
        return done.returncode, json.loads(file.read_text()) if file.exists() else nothing


def _emulator(options: argparse.Namespace, hbm: int) -> list[str]:
    """What runs a script on the modelled device."""
    command = [sys.executable, "-m", _EMULATOR, "--clock", options.chip, "--dry", "--hbm", str(hbm)]
    return [*command, "--host", str(options.host), *(["--server", options.server] if options.server else [])]


def _complete(options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Raises ValueError where the script's steps were not enough, with what was missing."""
    if found["missing"]:
        most = MOST * options.steps
        raise ValueError(
            f"{options.script} has ended after {_steps(found)}, and {found['missing']}. "
            + (f"--steps {most} makes up to {MOST * most}" if found["steps"] >= most else _NEEDED)
        )


def _steps(found: dict[str, Any]) -> str:
    """How many steps were begun, as "3 steps"."""
    return f"{found['steps']} step{'' if found['steps'] == 1 else 's'}"


def _sweep(step: Profile, link: Link, states: StatesShare, budget: int) -> list[dict[str, float]]:
    """Plans for budgets from the least possible one to what is enough to move nothing, and for the asked one.

    In bytes and seconds.
    """
    least, most = max(floor(step.moments)[0], states.step_peak), max(step.moments.full) + states.total
    budgets = {least + (most - least) * k // (_POINTS - 1) for k in range(_POINTS)} | {budget}
    return [_planned(step, link, states, each) for each in sorted(budgets) if each >= least]


def _planned(step: Profile, link: Link, states: StatesShare, budget: int) -> dict[str, float]:
    kept = states_to_keep(step, budget, link, states)[0] if states.total else 0
    made = plan(step, budget - kept, link)
    passing = link.exchange(states.total - kept)
    return {
        "budget": budget,
        "peak": max(made.peak, states.step_peak) + kept,
        "seconds": made.seconds + passing,
        "waits": made.waits,
        "least": made.bound + passing,
        "moved": moved(step, made),
        "states_kept": kept,
    }


def _show(text: str, plans: Sequence[dict[str, float]], options: argparse.Namespace, *, fits: bool) -> None:
    screen = console()
    screen.print(plain(f"{options.script} on a modelled {options.chip}, in a dry run"), soft_wrap=True)
    for line in text.splitlines():
        screen.print(plain(line), soft_wrap=True)
    if plans:
        columns = {
            "budget": True,
            "peak": True,
            "step": True,
            "waits": True,
            "moved": True,
            "states": True,
            "": False,
        }
        rows = [
            (
                format_bytes(int(each["budget"])),
                format_bytes(int(each["peak"])),
                format_seconds(each["seconds"]),
                format_seconds(each["waits"]),
                format_bytes(int(each["moved"])),
                format_bytes(int(each["states_kept"])),
                "asked for" if each["budget"] == options.budget else "",
            )
            for each in plans
        ]
        screen.print(table("other budgets, as planned", columns, rows))
    if fits:
        told = format_bytes(options.budget)
        budget = f'"{told}"' if parse_bytes(told) == options.budget else options.budget
        screen.print(f'use: TieringManager(policy="auto", device_budget={budget})')


def _draw(plans: Sequence[dict[str, float]], options: argparse.Namespace) -> None:
    """Draws the sweep: peak memory against the step's time."""
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("agg")
    figure, axes = importlib.import_module("matplotlib.pyplot").subplots()
    peaks = [each["peak"] / 2**30 for each in plans]
    for name, seconds in (
        ("planned", [each["seconds"] for each in plans]),
        ("no plan is below", [each["least"] for each in plans]),
    ):
        axes.plot(peaks, seconds, marker=".", label=name)
    axes.axvline(options.budget / 2**30, linestyle=":", label="asked for")
    axes.set(
        xlabel="peak of device memory, GiB",
        ylabel="seconds of a step",
        title=f"{Path(options.script).name}, {options.chip}",
    )
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(options.plot)

"""Plan a training for a device that is not here: what fits, how long a step takes, what it waits for.

Runs SCRIPT, which trains with TieringManager(policy="auto"), on the emulated NPU in dry runs: memory is counted and
time is modelled, nothing is computed, and no device is needed. The first run has all the memory that it wants, and
is recorded, also with its layers computed again. The second one has the budget, and tries the plan. Each is ended
after STEPS steps, or after more where it is not known by then how layers are treated best, or optimizer states have
not come to rest, by an exception out of the forward that would begin the next one; `with` and `finally` blocks run.
What the script saves is all zeros, so let it save to another place. Options come before SCRIPT; what comes after it
is the script's. The exit status is 1 if the training does not fit.
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
from ..policies.planning.disk_and_states import Crossing, StatesShare, explained
from ..rehearsal import MOST, VARIABLE, Wish
from ..sizes import format_bytes, format_seconds, parse_bytes
from .output import console, plain, size, table, with_units, write_json
from .sweep import BudgetRow, Sweep, ways_of

_EMULATOR = "ascend_emulator"
# Of the device, beside the budget: torch's allocator has memory in pieces that nobody can use.
_FRAGMENTS = 0.04
# Of a device that has room for everything: nothing is behind the memory of a dry run.
_AMPLE = 1 << 42
_UNITS = {
    **dict.fromkeys(("budget", "peak", "moved", "states_kept"), "bytes"),
    **dict.fromkeys(("waits", "least", "plain", "checkpointed", "moving"), "seconds"),
}
_NEEDED = (
    "It has to train at least 3 steps: the first is recorded, and one that went by the plan is measured when the "
    'next begins; with residency="auto" it takes one or two more, and to try how layers are computed again five'
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
    parser.add_argument("--sweep", action="store_true", help="plan for other budgets than the one too")
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
    status, ample = _rehearse(options, "recording", _AMPLE, _AMPLE // 2, records=True)
    if status:
        raise ValueError(
            f"{options.script} has failed in its recording, after {_steps(ample)}, with exit status {status}. It "
            "says above what went wrong"
        )
    _complete(options, ample)
    step, link = Profile(**ample["step"]), Link(**ample["link"])
    problem, report, text = _try(options, step, link, ample["names"])
    states = ample["states"]
    beside = {part: Crossing(**states[part]) for part in ("forward", "backward")}
    sweep = Sweep(ways_of(ample), link, StatesShare(**{**states, **beside}))
    others = sweep.budgets() if options.sweep or options.plot is not None else []
    plans = sweep.within({*others, options.budget})
    if options.plot is not None:
        _draw(plans, options)
    if options.json:
        rows = [with_units(each.as_dict(), _UNITS) for each in plans]
        write_json({"problem": problem, "report": report, "sweep": rows})
    else:
        _show(problem or text, plans, options, fits=not problem)
        if ample["undecided"]:
            console().print(plain(f"{_steps(ample)} were too few to try how layers are computed again. {_NEEDED}"))
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


def _rehearse(
    options: argparse.Namespace, what: str, hbm: int, budget: int, *, records: bool = False
) -> tuple[int, dict[str, Any]]:
    """Runs the script on a device with so much memory. Its exit status, and what it has found."""
    sys.stderr.write(f"tiered-mem: {what}, {options.steps} steps\n")
    with tempfile.TemporaryDirectory(prefix="tiered-mem-plan-") as folder:
        file = Path(folder) / "found.json"
        command = [*_emulator(options, hbm), options.script, *options.arguments]
        wish = Wish(options.steps, budget, file, records=records)
        environment = os.environ | {VARIABLE: wish.said()}
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


def _show(text: str, plans: Sequence[BudgetRow], options: argparse.Namespace, *, fits: bool) -> None:
    screen = console()
    screen.print(plain(f"{options.script} on a modelled {options.chip}, in a dry run"), soft_wrap=True)
    for line in text.splitlines():
        screen.print(plain(line), soft_wrap=True)
    if plans:
        columns = ("budget", "plain", "checkpointed", "moving", "auto", "moved", "states")
        shown = {name: True for name in columns} | {"computed again": False, "": False}
        rows = [
            (
                *(format_bytes(each.budget), _seconds(each.plain)),
                *(_checkpointed(each), _seconds(each.moving), _seconds(each.seconds)),
                *(format_bytes(each.moved), format_bytes(each.states_kept)),
                ", ".join(f"{count} {how}" for how, count in sorted(each.mix.items())) or "-",
                "asked for" if each.budget == options.budget else "",
            )
            for each in plans
        ]
        screen.print(table("the step within budgets, as planned", shown, rows))
    if fits:
        told = format_bytes(options.budget)
        budget = f'"{told}"' if parse_bytes(told) == options.budget else options.budget
        screen.print(f'use: TieringManager(policy="auto", device_budget={budget})')


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(seconds)


def _checkpointed(step: BudgetRow) -> str:
    told = _seconds(step.checkpointed)
    return told if step.checkpointed_layers is None else f"{told} ({step.checkpointed_layers})"


def _draw(plans: Sequence[BudgetRow], options: argparse.Namespace) -> None:
    """Draws the sweep: the budget against the step's time."""
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("agg")
    figure, axes = importlib.import_module("matplotlib.pyplot").subplots()
    for name, seconds in (
        ("plain", [each.plain for each in plans]),
        ("checkpointed, best number of layers", [each.checkpointed for each in plans]),
        ("moving alone", [each.moving for each in plans]),
        ('policy="auto"', [each.seconds for each in plans]),
        ("no plan with its mix is below", [each.least for each in plans]),
    ):
        there = [(each.budget / 2**30, s) for each, s in zip(plans, seconds, strict=True) if s is not None]
        axes.plot([x for x, _ in there], [y for _, y in there], marker=".", label=name)
    axes.axvline(options.budget / 2**30, linestyle=":", label="asked for")
    axes.set(
        xlabel="budget of device memory, GiB",
        ylabel="seconds of a step",
        title=f"{Path(options.script).name}, {options.chip}",
    )
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(options.plot)

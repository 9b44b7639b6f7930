"""python -m ascend_emulator --dry --clock 910b3 --hbm 160GiB -m tests.fuzz_budget.real_size: budgets at real size.

Thirty combinations of a Llama 2, a length, a budget and a residency of its optimizer's states, a few steps of each
in a dry run. After each step torch's own peak is compared with the budget, and in the end the report with what
torch counted.
"""

from __future__ import annotations

import gc
import itertools
import logging
import sys
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from examples.llama import SHAPES, Llama
from tests.fuzz_budget.judge import Finding, judge_steps
from tests.fuzz_budget.watched import Step, Watch
from tests.fuzz_budget.witness import Witness
from tiered_mem import TieringManager
from tiered_mem.optimizer.registered import Residency
from tiered_mem.policies.planning import BudgetTooSmall
from tiered_mem.policies.planning.report import Report
from tiered_mem.sizes import format_bytes, format_seconds, parse_bytes

_STEPS = 7


class Training(NamedTuple):
    shape: str
    tokens: int
    budget: str
    residency: Residency


TRAININGS = [
    Training(shape, tokens, budget, residency)
    for shape, budgets in {"7b": ("29GiB", "34GiB", "45GiB", "60GiB"), "13b": ("54GiB",)}.items()
    for tokens, budget, residency in itertools.product((2048, 4096, 8192), budgets, ("auto", "host"))
]


class Trained(NamedTuple):
    """error: what ended it, in words."""

    steps: list[Step]
    report: Report
    error: str


def train(training: Training) -> Trained:
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("npu"):
        model = Llama(SHAPES[training.shape], training.tokens)
    x = torch.zeros((1, training.tokens), dtype=torch.int64).to("npu")
    error = ""
    with (
        Witness() as witness,
        TieringManager(device_budget=training.budget, host_bytes="400GiB") as manager,
        manager.attach(model),
    ):
        optimizer = manager.register_optimizer(
            torch.optim.AdamW(model.parameters(), foreach=False), residency=training.residency
        )
        watch = Watch(witness)
        with watch.listening():
            try:
                for _ in range(_STEPS):
                    with watch.step("plain"):
                        with watch.part("training"):
                            model(x, x).backward()
                        with watch.part("optimizer"):
                            optimizer.step()
                            optimizer.zero_grad()
                        torch.npu.synchronize()  # as a program does that prints its loss
            except BudgetTooSmall as refused:
                error = str(refused)
        return Trained(watch.steps, manager.report(), error)


def main() -> int:
    logging.getLogger("tiered_mem").addHandler(logging.NullHandler())
    console, findings = Console(), 0
    table = Table("training", "budget", "peak", "states kept", "step", "no plan is below", "found")
    for training in track(TRAININGS, "trainings", console=console):
        trained = train(training)
        gc.collect()
        found = judge_steps(trained.steps, trained.report, parse_bytes(training.budget), ended=bool(trained.error))
        findings += len(found)
        table.add_row(*_row(training, trained, found))
    console.print(table)
    console.print(f"{len(TRAININGS)} trainings, {findings} findings")
    return 1 if findings else 0


def _row(training: Training, trained: Trained, found: list[Finding]) -> list[str]:
    report = trained.report
    times = [format_seconds(each) if each is not None else "-" for each in (report.measured, report.least)]
    peak = max(step.peak for step in trained.steps)
    said = "; ".join(finding.text for finding in found) or ("too small, told" if trained.error else "nothing")
    name = f"{training.shape}, {training.tokens} tokens, {training.residency}"
    return [name, training.budget, format_bytes(peak), format_bytes(report.states_kept), *times, said]


if __name__ == "__main__":
    sys.exit(main())

"""Runs cases, and counts what came of them."""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from collections import Counter
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from tests.fuzz_budget.case import Case, draw_case
from tests.fuzz_budget.judge import Finding, judge
from tests.fuzz_budget.models import COSTS
from tests.fuzz_budget.training import Outcome, train

_OWN_OPTIONS = ("--programs", "--seconds", "--seed", "--case")


@dataclass(frozen=True)
class Verdict:
    """What came of a case. left_out: why it was not judged."""

    case: Case
    budget: int
    findings: tuple[Finding, ...]
    plain: Outcome | None = None
    tiered: Outcome | None = None
    left_out: str | None = None

    def show(self, console: Console, *, everything: bool = False) -> None:
        def say(text: str, style: str = "") -> None:
            console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

        if everything:
            say(f"{self.case}\n  budget {self.budget:,} bytes")
        if everything and self.plain is not None and self.tiered is not None:
            for plain, step in zip(self.plain.steps, self.tiered.steps, strict=False):
                mark = "above" if step.peak > self.budget else ""
                say(f"  {step.number} {step.kind}: {step.peak:,} in its {step.where}, plain {plain.peak:,} {mark}")
                for message in step.said:
                    say(f"      said: {message}")
            say(f"  moved {self.tiered.moved:,} bytes; ended by {self.tiered.error!r}")
            say(str(self.tiered.report or self.tiered.unreported))
        if self.left_out:
            say(f"left out: {self.left_out}")
        for finding in self.findings:
            say(f"case {self.case.number}: {finding.group}", "red")
            say(f"  {finding.text}")
        said = [message for step in self.tiered.steps for message in step.said] if self.tiered else []
        for message in [] if everything else said[-3:]:
            say(f"  said: {message}")
        say(f"  again with: {again(self.case.number)}")


def run_case(number: int) -> Verdict:
    case = draw_case(number)
    try:
        plain = train(case, None)
    except RuntimeError as error:
        return Verdict(case, 0, (), left_out=f"plain raises {str(error).splitlines()[0][:80]}")
    budget = int(case.manager.share * plain.peak)
    try:
        tiered = train(case, budget, int(case.manager.host * plain.peak))
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        return Verdict(case, budget, (Finding(f"raises {type(error).__name__}", text),), plain)
    modelled = bool(os.environ.get("ASCEND_EMULATOR_CLOCK"))
    registered = case.optimizer.residency in ("host", "disk", "auto")
    # A layer that was just computed again; and with "cheap", of each layer a result that autograd does not save.
    more = {None: 0, "full": _costliest(case), "cheap": _costliest(case) + len(case.model.layers)}[
        case.manager.recompute
    ]
    trial = int(more * max(step.rows for step in case.steps) * case.model.nbytes)
    findings = judge(plain, tiered, budget, registered=registered, modelled=modelled, trial=trial)
    return Verdict(case, budget, tuple(findings), plain, tiered)


def _costliest(case: Case) -> int:
    return max(COSTS[kind] for kind in case.model.layers)


def again(number: int) -> str:
    """The command that runs a case again, on the same device as now."""
    words, kept = iter(sys.orig_argv[1:]), ["python"]
    for word in words:
        if word in _OWN_OPTIONS:
            next(words, None)
        elif word.partition("=")[0] not in _OWN_OPTIONS:
            kept.append(word)
    return shlex.join([*kept, "--case", str(number)])


@dataclass
class Tally:
    """groups: how many cases have findings of each, and the first of these."""

    cases: Counter[str] = field(default_factory=Counter)
    findings: Counter[str] = field(default_factory=Counter)
    first: dict[str, int] = field(default_factory=dict)

    @property
    def cases_with_findings(self) -> int:
        return self.cases["with findings"]

    def take(self, verdict: Verdict) -> bool:
        """Counts a case. Whether it has a finding of a new group."""
        groups = dict.fromkeys((finding.group for finding in verdict.findings), 1)
        new = [group for group in groups if group not in self.first]
        self.first |= dict.fromkeys(new, verdict.case.number)
        self.findings.update(groups)
        self.cases["all"] += 1
        self.cases["left out"] += verdict.left_out is not None
        self.cases["with findings"] += bool(groups)
        if verdict.tiered is not None:
            self.cases["moved"] += verdict.tiered.moved > 0
            self.cases["above"] += verdict.tiered.peak > verdict.budget
            self.cases["ended early"] += verdict.tiered.error is not None
        return bool(new)

    def show(self, console: Console, seconds: float) -> None:
        table = Table("findings", "cases", "first")
        for group, count in self.findings.most_common():
            table.add_row(group, str(count), str(self.first[group]))
        if self.findings:
            console.print(table)
        counts = ", ".join(f"{count} {name}" for name, count in self.cases.items())
        console.print(f"cases: {counts}; {60 * self.cases['all'] / seconds:.0f} a minute", highlight=False)

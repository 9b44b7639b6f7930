"""Whether a budget was kept, or told of, and whether a report is true."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.fuzz_budget.training import Outcome
from tests.fuzz_budget.watched import Step
from tiered_mem.errors import TierFull
from tiered_mem.policies.planning import BudgetTooSmall
from tiered_mem.policies.planning.report import Report

# torch's pool gives a tensor up to this much more than it asks for.
ROUNDED = 1 << 20
# The part by which a report may differ from what torch counts, and a time from what can be.
_DIFFERS, _NOISE = 0.01, 0.02
# The part of a budget that the library may leave free for what torch's pool gives on top.
_MARGIN = 1 / 16
# The part of the plain run's peak that tiering may add, for what is on its way.
_ADDED = 0.1
# A report speaks of one of the last steps.
_LAST = 8
_OFTEN = 3
# In what is said of an attached model of which no layer's call was seen.
UNSEEN = "and no call of theirs was seen before: nothing of what they saved moves"
_NUMBER = re.compile(r"\d[\d,.]*")
_SIZE = re.compile(r"\d (bytes|B|KiB|MiB|GiB|TiB)\b")


@dataclass(frozen=True)
class Finding:
    """group: findings of one group are alike. text: what was found, with numbers."""

    group: str
    text: str


def tells(message: str) -> bool:
    """Whether a warning gives the size of something."""
    return _SIZE.search(message) is not None


def silent(steps: Sequence[Step], budget: int, *, ended: bool = False) -> list[Step]:
    """The steps above the budget for a cause that nobody was told of by the end of the next step.

    A warning with sizes tells of the steps beside it. Those like them need no second one: steps that do the same
    with the graph, with any batch, and take the most in the same part; for an optimizer's part all steps; and all
    of which nothing could move. The last step has no next one, by the end of which it would be told of.
    ended: with an error that gives the numbers, which tells of the last two steps.

    An evaluation comes after the last event of a step, and the program begins torch's peak anew before the next
    one: nobody can know what it took. So does the backward of a step that saved nothing that could move; but the
    next one has to, by a lower `min_bytes`, or it is told of that one. Where no call of a layer was seen, that is
    told at the first backward, and nothing is known of any step.
    """
    if any(UNSEEN in message for step in steps for message in step.said):
        return []
    told: set[tuple[str, str]] = set()
    found = []
    for step in steps:
        if step.peak <= budget:
            continue
        cause = _cause(step)
        near = steps[max(0, step.number - 1) : step.number + (2 if step.blocks else 3)]
        if any(tells(message) for each in near for message in each.said):
            told.add(cause)
        rounded = step.requested <= budget and step.peak - budget < ROUNDED
        unseen = not step.blocks and all(after.blocks for after in steps[step.number + 1 : step.number + 2])
        last = step.number >= len(steps) - (2 if ended else 1)
        if not (cause in told or rounded or unseen or last or step.where == "evaluation"):
            found.append(step)
    return found


def _cause(step: Step) -> tuple[str, str]:
    if not step.blocks:
        return "nothing could move", ""
    return step.where, "" if step.where == "optimizer" else _what(step)


def _what(step: Step) -> str:
    """What it does with the graph: the first word of its kind."""
    return step.kind.partition(" ")[0]


def judge(
    plain: Outcome,
    tiered: Outcome,
    budget: int,
    *,
    registered: bool = False,
    modelled: bool = False,
    trial: int = 0,
) -> list[Finding]:
    """registered: whether the manager has all optimizers. modelled: whether times are those of a modelled clock.

    trial: the bytes of a layer that is computed again though it has kept all.
    """
    return [
        *_of_the_budget(plain, tiered, budget, registered=registered),
        *_of_what_is_added(plain, tiered, budget, trial),
        *_of_torch(tiered.steps),
        *_of_what_was_said(tiered, registered=registered),
        *_of_the_error(plain, tiered, budget),
        *_of_the_report(tiered, budget, registered=registered, modelled=modelled),
        *_of_the_rest(plain, tiered),
    ]


def judge_steps(steps: Sequence[Step], report: Report, budget: int, *, ended: bool) -> list[Finding]:
    """Of a training on the modelled clock that has no plain run to compare it with. ended: as for `silent`."""
    above = [
        Finding("above in silence", f"step {step.number} took {_mib(step.peak)} in its {step.where}")
        for step in silent(steps, budget, ended=ended)
    ]
    return [*above, *_of_torch(steps), *_of_a_report(report, steps, budget, modelled=True)]


def _of_the_budget(plain: Outcome, tiered: Outcome, budget: int, *, registered: bool) -> list[Finding]:
    found: dict[str, list[str]] = {}
    for step in silent(tiered.steps, budget, ended=tiered.error is not None and _has_numbers(tiered.error)):
        if step.where == "optimizer" and not registered:
            continue  # it is as for evaluations
        other = plain.steps[step.number].peak
        by = "where the plain run is not, " if other <= budget else ""
        kind = "" if step.where == "optimizer" else f", {_what(step)}"
        text = f"step {step.number} took {_mib(step.peak)} of {_mib(budget)} (plain {_mib(other)})"
        found.setdefault(f"above in silence, {by}{step.where}{kind}", []).append(text)
    return [Finding(group, f"{texts[0]}, one of {len(texts)} steps") for group, texts in found.items()]


def _of_what_is_added(plain: Outcome, tiered: Outcome, budget: int, trial: int) -> list[Finding]:
    """Above the budget, whether told or not, a step may not take more than it does without a manager."""
    found = []
    for step, other in zip(tiered.steps, plain.steps, strict=False):
        if step.peak > budget and step.peak > other.peak * (1 + _ADDED) + ROUNDED + trial:
            found.append(f"step {step.number} took {_mib(step.peak)} of {_mib(budget)} (plain {_mib(other.peak)})")
    return [Finding("more than the plain run takes", f"{found[0]}, one of {len(found)} steps")] if found else []


def _of_torch(steps: Sequence[Step]) -> list[Finding]:
    hidden = [step for step in steps if step.told < step.peak]
    if not hidden:
        return []
    text = f"in step {hidden[0].number} torch told {_mib(hidden[0].told)} where it was {_mib(hidden[0].peak)}"
    return [Finding("torch's peak is hidden", f"{text}, and so in {len(hidden)} steps")]


def _of_what_was_said(tiered: Outcome, *, registered: bool) -> list[Finding]:
    said = [message for step in tiered.steps for message in step.said]
    counts = Counter(_NUMBER.sub("N", message) for message in said)
    often = [f"{count} times: {message}" for message, count in counts.items() if count > _OFTEN]
    found = [Finding("said again and again", text) for text in often]
    advice = [message for message in (*said, str(tiered.error)) if "register_optimizer" in message]
    if registered and advice:
        found.append(Finding("advises to register what is registered", advice[0]))
    return found


def _of_the_error(plain: Outcome, tiered: Outcome, budget: int) -> list[Finding]:
    error = tiered.error
    if error is None:
        return []
    text = f"{type(error).__name__} in step {len(tiered.steps) - 1}: {error}"
    if not _has_numbers(error):
        return [Finding(f"raises {type(error).__name__}", text)]
    if isinstance(error, TierFull) and not tiered.steps:
        return []  # the program asked for states on a host that has no room for them
    if plain.peak <= budget:
        return [Finding(f"{type(error).__name__} though the plain run fits", text)]
    if isinstance(error, BudgetTooSmall) and error.floor > plain.peak * (1 + _MARGIN):
        return [Finding("a floor above what the plain run takes", f"plain {_mib(plain.peak)}; {text}")]
    return []


def _has_numbers(error: Exception) -> bool:
    return isinstance(error, (BudgetTooSmall, torch.OutOfMemoryError, TierFull)) and tells(str(error))


def _of_the_report(tiered: Outcome, budget: int, *, registered: bool, modelled: bool) -> list[Finding]:
    if tiered.report is None:
        error = tiered.unreported
        return [Finding(f"report() raises {type(error).__name__}", f"report() raised {error}")]
    return _of_a_report(tiered.report, tiered.steps, budget, registered=registered, modelled=modelled)


def _of_a_report(
    report: Report, steps: Sequence[Step], budget: int, *, registered: bool = True, modelled: bool
) -> list[Finding]:
    found = []
    if report.budget != budget:
        found.append(Finding("report: budget", f"the report's budget is {_mib(report.budget)} of {_mib(budget)}"))
    peak = report.measured_peak
    if peak is not None and not agrees(peak, steps[-_LAST:], registered=registered):
        peaks = ", ".join(_mib(step.peak) for step in steps[-_LAST:])
        found.append(Finding("report: measured peak", f"measured_peak is {_mib(peak)}, and steps took {peaks}"))
    least, measured = report.least, report.measured
    if modelled and least is not None and measured is not None and measured < least * (1 - _NOISE):
        text = f"measured {measured:.6f} s, and no plan is below {least:.6f} s"
        found.append(Finding("report: measured below the least", text))
    return found


def agrees(peak: int, steps: Sequence[Step], *, registered: bool = True) -> bool:
    """Whether a report's peak is that of one of the steps.

    A step of several forwards is several steps for the library. Of these each may have taken less than the whole.
    So may a teacher's forward, with which a step begins here and the last one ends there.
    registered: whether the manager has all optimizers, and sees what their steps take.
    """
    if any(abs(peak - step.peak) <= _DIFFERS * step.peak for step in steps):
        return True
    unseen = ("evaluation",) if registered else ("evaluation", "optimizer")
    if any((step.where in unseen or not step.blocks) and peak <= step.peak for step in steps):
        return True  # as for `silent`: what it took before that is not known here
    several = [step.peak for step in steps if step.forwards != 1 or "teacher" in step.kind]
    return bool(several) and peak <= max(several)


def _of_the_rest(plain: Outcome, tiered: Outcome) -> list[Finding]:
    found = []
    if tiered.error is None and not _same(plain.numbers, tiered.numbers):
        found.append(Finding("other numbers", "losses or weights are not those of the plain run"))
    if tiered.left:
        found.append(Finding("memory is left", f"{tiered.left} bytes are still allocated"))
    return found


def _same(expected: Sequence[Tensor], found: Sequence[Tensor]) -> bool:
    return len(expected) == len(found) and all(
        torch.equal(_bits(a), _bits(b)) and torch.equal(a.isnan(), b.isnan())
        for a, b in zip(expected, found, strict=True)
    )


def _bits(values: Tensor) -> Tensor:
    """All bits but those of a NaN, which are any: they depend on where in memory the values are."""
    return values.masked_fill(values.isnan(), 0).reshape(-1).view(torch.uint8)


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.2f} MiB"

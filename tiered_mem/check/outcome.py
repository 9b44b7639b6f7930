"""What a check is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from .bench import Bench

Verdict: TypeAlias = Literal["pass", "fail", "not applicable"]
# By name, each with its unit; "" for what has none.
Figures: TypeAlias = dict[str, tuple[float, str]]


@dataclass(frozen=True)
class Outcome:
    """reason: what was seen, in words."""

    verdict: Verdict
    reason: str
    figures: Figures = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """One line of the table.

    run: looks at the machine. What it raises is a failure, with the words of the error.
    needs: the names of checks before this one. Where one of them has failed, this one would only fail with it, and
        blame something else, so it is not run.
    on_cpu: why it means nothing on a cpu; "" where it does.
    """

    name: str
    run: Callable[[Bench], Outcome]
    needs: tuple[str, ...] = ()
    on_cpu: str = ""


def passed(reason: str, **figures: tuple[float, str]) -> Outcome:
    return Outcome("pass", reason, figures)


def failed(reason: str, **figures: tuple[float, str]) -> Outcome:
    return Outcome("fail", reason, figures)


def not_applicable(reason: str) -> Outcome:
    return Outcome("not applicable", reason)

"""A part of the fuzz: one device and schedule."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FINDING = "finding"


@dataclass
class Part:
    """What the cases on one device and schedule have come to so far.

    moved: cases in which something left the device. findings: the case, in a line, and all there is to tell.
    """

    device: str
    schedule: str | None
    seconds: float = 0.0
    moved: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    findings: list[tuple[int, str, str]] = field(default_factory=list)

    def __str__(self) -> str:
        return self.device if self.schedule is None else f"{self.device}, {self.schedule}"

    def command(self, first: int, *arguments: str) -> list[str]:
        """What runs a worker from that case on. Of the random schedule each worker has another order."""
        start: list[str] = []
        if self.schedule is not None:
            start = ["-m", "ascend_emulator", "--races", "--schedule", self.schedule, "--seed", str(first)]
        worker = ["-m", "tests.fuzz", "--worker", "--device", self.device, "--first", str(first)]
        return [sys.executable, *start, *worker, *arguments]

    def again(self, case: int) -> str:
        """The command that runs a case again."""
        schedule = "" if self.schedule is None else f" --schedule {self.schedule}"
        return f"python -m tests.fuzz --case {case} --device {self.device}{schedule}"

    def take(self, line: Mapping[str, Any]) -> None:
        """Notes what a worker has told of a case."""
        self.kinds[line["kind"]] += 1
        self.moved += bool(line["moved"])
        if line["kind"] == FINDING:
            self.findings.append((line["case"], line["why"], line["text"]))
        elif line["why"]:
            self.reasons[line["why"]] += 1

    def died(self, case: int, code: int, said: str) -> None:
        """Notes that a worker ended within a case. said: its last words."""
        self.kinds[FINDING] += 1
        self.findings.append((case, f"the process ended with {code} within the case, or hung", said))

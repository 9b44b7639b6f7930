"""A plugin of pytest's that writes down what became of each test as soon as it is known.

    python -m pytest -p benchmarks.counted_tests --outcomes FILE ...

What ran before a time limit ended the run is in the file all the same: a line of JSON for each test, with its name
and its outcome, and for each file that was skipped or could not be imported.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

_LONGEST = 500


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, required=True, help="the file to write to")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # xdist's workers tell the process that has begun them
        config.pluginmanager.register(_Outcomes(config.getoption("--outcomes")))


class _Outcomes:
    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            failed = "failed" if report.when == "call" else "error"
            self._add(report, failed if report.outcome == "failed" else report.outcome)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self._add(report, "error" if report.outcome == "failed" else "skipped")

    def _add(self, report: pytest.TestReport | pytest.CollectReport, outcome: str) -> None:
        why = ""
        if outcome == "skipped" and isinstance(report.longrepr, tuple):
            why = str(report.longrepr[2]).removeprefix("Skipped: ")
        elif outcome != "passed":
            crash = getattr(report.longrepr, "reprcrash", None)  # not there where a file could not be imported
            why = str(report.longrepr or "").strip() if crash is None else str(crash.message)
            why = why[:_LONGEST]
        with self._path.open("a") as file:
            file.write(json.dumps({"test": report.nodeid, "outcome": outcome, "why": why}) + "\n")

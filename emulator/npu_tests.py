"""Runs torch_npu's own tests on the emulated NPU, and counts what becomes of them.

    python -m ascend_emulator emulator/npu_tests.py TESTS [--results FILE] [--seconds 300] [--jobs 2] [NAME ...]

TESTS is the folder test of torch_npu's sources, https://gitcode.com/Ascend/pytorch. The names are folders and files
in it, by default SELECTION. Each file has a process of its own, which is ended after so many seconds. With
--results, what became of each test is a line of JSON in that file.
"""

import argparse
import json
import multiprocessing
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import pytest

SELECTION = ("custom_ops", "contrib", "trans_contiguous", "test_copy_.py")

# Each file's process is forked off this one, which has imported torch_npu, but not asked for a device. Where a file
# says first how torch_npu is to be imported, its process becomes another Python.
_fork = multiprocessing.get_context("fork")
_SAYS_HOW = re.compile(r"^os\.environ\[.*^import torch_npu", re.MULTILINE | re.DOTALL)


class Outcomes:
    """Has pytest write what becomes of each test into a file, line by line, for a crash would lose the rest."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test passes by its call; it fails or is skipped while it is set up or torn down as well."""
        if report.passed and report.when != "call":
            return
        self._write(report.nodeid, report.outcome, _why(report))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(report.nodeid, "failed", _why(report))

    def _write(self, test: str, outcome: str, why: str) -> None:
        with self._file.open("a") as lines:
            lines.write(json.dumps({"test": test, "outcome": outcome, "why": why}) + "\n")


def _why(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return str(crash.message)
    return (str(report.longrepr or "").strip().splitlines() or [""])[-1]


class Run:
    """The tests of one file, in a process of their own."""

    def __init__(self, file: Path, folder: Path, seconds: float) -> None:
        self.file = file
        self._told = folder / f"{file.parent.name}.{file.stem}"
        self._told.touch()
        self._output = folder / f"{self._told.name}.output"
        self._end = time.monotonic() + seconds
        self.process: BaseProcess = _fork.Process(target=self._tests)
        self.process.start()

    def _tests(self) -> None:
        os.setsid()  # so that processes which a test starts end with it
        with self._output.open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        if _SAYS_HOW.search(self.file.read_text()):
            emulated = [sys.executable, "-m", "ascend_emulator", __file__]
            os.execv(sys.executable, [*emulated, str(self.file), "--outcomes", str(self._told)])
        run_pytest(self.file, self._told)

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self._end

    def outcomes(self) -> list[dict[str, str]]:
        """A process that has not come to its end by itself is one outcome more. Nothing that it started is left."""
        late = self.process.is_alive()
        assert self.process.pid is not None
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        outcomes = [json.loads(line) for line in self._told.read_text().splitlines()]
        if late or self.process.exitcode != 0:
            why = "took too long" if late else self._output.read_text(errors="replace")[-2000:]
            outcomes.append({"test": self.file.name, "outcome": "crashed", "why": why})
        return outcomes


def run_pytest(file: Path, outcomes: Path) -> NoReturn:
    os.chdir(file.parent)
    sys.path.insert(0, str(file.parent))
    sys.argv = [file.name]
    arguments = ["-q", "-p", "no:cacheprovider", "--rootdir", str(file.parent), file.name]
    told = pytest.main(arguments, plugins=[Outcomes(outcomes)])
    sys.exit(told not in (0, 1, 2, 5))  # none failed, some did, the file did not import, and there are none


def runs(files: list[Path], jobs: int, seconds: float) -> Iterator[Run]:
    """As they end."""
    waiting = files[::-1]
    running: list[Run] = []
    with TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(Run(waiting.pop(), Path(folder), seconds))
            wait([run.process.sentinel for run in running], timeout=1)
            for run in [run for run in running if run.is_late or not run.process.is_alive()]:
                running.remove(run)
                yield run


def files_of(tests: Path, names: list[str]) -> Iterator[Path]:
    for name in names:
        path = tests / name
        yield from sorted(path.glob("test_*.py")) if path.is_dir() else [path]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", type=Path)
    parser.add_argument("names", nargs="*", default=SELECTION)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--outcomes", type=Path, help=argparse.SUPPRESS)  # of this one file, and in this process
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_intermixed_args()
    if options.outcomes is not None:
        run_pytest(options.tests, options.outcomes)
    import_module("torch_npu.testing.testcase")
    tests = options.tests.resolve()
    counts: Counter[str] = Counter()
    for run in runs(list(files_of(tests, list(options.names))), options.jobs, options.seconds):
        outcomes = run.outcomes()
        name, of_file = str(run.file.relative_to(tests)), Counter(each["outcome"] for each in outcomes)
        counts += of_file
        print(name, *(f"{of_file[kind]} {kind}" for kind in sorted(of_file)), flush=True)
        if options.results is not None:
            with options.results.open("a") as lines:
                lines.writelines(json.dumps({"file": name, **each}) + "\n" for each in outcomes)
    print(sum(counts.values()), "outcomes:", *(f"{counts[kind]} {kind}" for kind in sorted(counts)))


if __name__ == "__main__":
    main()

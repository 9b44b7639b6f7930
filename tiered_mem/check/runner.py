"""Runs the checks in a process that is killed when one of them hangs. It needs no torch."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import DeviceUnavailable
from ..spill.folder import sweep

# How long torch and the device may take to begin.
_START_S = 180.0
_LETTERS = 300


@dataclass(frozen=True)
class Line:
    """What was found of one check. figures: by name, each with its value and unit."""

    name: str
    subject: str
    verdict: Literal["pass", "fail", "not applicable", "not run"]
    reason: str
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: float = 0.0


class Runner:
    """Runs all checks, each in the process of the one before unless that has failed, hung or died.

    folder: a directory on the drive to check. limit: the seconds that one check may take.
    command: starts a worker, for tests.

    Raises DeviceUnavailable where the device is not there, or torch does not begin.
    """

    def __init__(
        self,
        *,
        device: str | None,
        folder: str,
        quick: bool,
        limit: float,
        command: Sequence[str] = (sys.executable, "-m", "tiered_mem.check"),
    ) -> None:
        self._folder = folder
        self._limit = limit
        self._gone = ""  # why no worker begins any more
        said = json.dumps({"device": device, "folder": folder, "quick": quick})
        self._start: Callable[[], _Worker] = lambda: _Worker([*command, said])
        self._worker: _Worker | None = self._start()
        try:
            self.device, self._checks = self._begun(self._worker)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int | None:
        """The process in which checks run now."""
        return None if self._worker is None else self._worker.pid

    @property
    def names(self) -> list[str]:
        return [check["name"] for check in self._checks]

    def lines(self, begins: Callable[[str], None] = lambda name: None) -> Iterator[Line]:
        """What is found, check by check. begins: is called with each name."""
        bad: dict[str, str] = {}
        for check in self._checks:
            name, subject = check["name"], check["subject"]
            begins(name)
            if spoilt := [each for each in check["needs"] if each in bad]:
                bad[name] = bad[spoilt[0]]
                yield Line(name, subject, "not run", f"it rests on {bad[name]!r}, which failed")
                continue
            line = self._run(name, subject)
            if line.verdict == "fail":
                bad[name] = name
                self.close()  # whatever it has left behind is no matter for the next one
            yield line

    def close(self) -> None:
        """Ends the process, and removes what it, and other dead ones of this user, have left on the drive."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None
            with contextlib.suppress(OSError):  # of a directory that is refused; its checks have told
                sweep(self._folder)

    def _run(self, name: str, subject: str) -> Line:
        worker = self._worker or self._begun_anew()
        if worker is None:
            return Line(name, subject, "fail", self._gone)
        began = time.monotonic()
        try:
            answer = worker.ask(name, self._limit)
        except TimeoutError:
            reason = f"it did not end within {self._limit:g} s, and was killed"
            return Line(name, subject, "fail", reason, seconds=round(time.monotonic() - began, 3))
        except EOFError as error:
            return Line(name, subject, "fail", str(error), seconds=round(time.monotonic() - began, 3))
        return Line(name, subject, **answer)

    def _begun_anew(self) -> _Worker | None:
        """A worker after a failure. None where it does not begin, and then no other is started."""
        if not self._gone:
            self._worker = self._start()
            try:
                self._begun(self._worker)
            except DeviceUnavailable as error:
                self._gone = f"no process began after the failure before: {error}"
                self.close()
        return self._worker

    def _begun(self, worker: _Worker) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        try:
            answer = worker.hear(_START_S)
        except TimeoutError:
            raise DeviceUnavailable(f"torch and the device did not begin within {_START_S:g} s") from None
        except EOFError as error:
            raise DeviceUnavailable(f"torch and the device do not begin: {error}") from None
        if "refused" in answer:
            raise DeviceUnavailable(answer["refused"])
        return answer["device"], answer["checks"]


class _Worker:
    """A process that checks what it is asked for. What it prints is kept for when it dies."""

    def __init__(self, command: Sequence[str]) -> None:
        self._held = contextlib.ExitStack()
        log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._log = self._held.enter_context(log)
        answers, theirs = os.pipe()
        self._answers = self._held.enter_context(os.fdopen(answers, "rb", buffering=0))
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS need not repeat itself
        try:
            self._process = subprocess.Popen(
                [*command, str(theirs)],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs,),
                env=environment,
                text=True,
                start_new_session=True,
            )
        finally:
            os.close(theirs)
        self._heard = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, name: str, limit: float) -> dict[str, Any]:
        """Raises TimeoutError, or EOFError where the process has died."""
        with contextlib.suppress(BrokenPipeError):
            if self._process.stdin is not None:
                self._process.stdin.write(f"{name}\n")
                self._process.stdin.flush()
        return self.hear(limit)

    def hear(self, limit: float) -> dict[str, Any]:
        """The next answer. Raises as `ask` does."""
        deadline = time.monotonic() + limit
        while b"\n" not in self._heard:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                raise TimeoutError
            if not (more := self._answers.read(1 << 16)):
                raise EOFError(self._end())
            self._heard += more
        line, _, self._heard = self._heard.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Ends the process, and what it may have started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._held.close()

    def _end(self) -> str:
        status = self._process.wait()
        how = f"by signal {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        self._log.seek(0)
        said = self._log.read().strip().splitlines() or ["it said nothing"]
        return f"the process ended {how}: {said[-1][:_LETTERS]}"

"""The processes of one part, one after the other."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence

from tests.fuzz.part import Part


class Processes:
    """Lets workers judge cases, until the time is over. Where one dies, another goes on with the next case.

    first, stride: the cases. arguments: more for the workers. told: called after each case.
    """

    def __init__(
        self, part: Part, first: int, stride: int, arguments: Sequence[str], told: Callable[[], None]
    ) -> None:
        self._part, self._told = part, told
        self._next, self._stride = first, stride
        self._arguments = arguments

    def run(self, seconds: float, *, once: bool = False) -> None:
        """once: a single process, whatever it comes to."""
        begin = time.monotonic()
        while (left := begin + seconds - time.monotonic()) > 0:
            before = self._next
            self._one(left, begin)
            if once or self._next == before:
                return

    def _one(self, seconds: float, begin: float) -> None:
        more = ["--stride", str(self._stride), "--seconds", str(seconds), *self._arguments]
        environment = dict(os.environ)
        if self._part.schedule is None:
            environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        with tempfile.TemporaryFile("w+", errors="replace") as errors:
            worker = subprocess.Popen(
                self._part.command(self._next, *more),
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )
            begun = self._listen(worker, begin)
            code = worker.wait()
            errors.seek(0)
            said = errors.read()[-20_000:]
        if begun is not None:
            self._next = begun + self._stride
        if begun is not None or code != 0:
            self._part.died(self._next if begun is None else begun, code, said)

    def _listen(self, worker: subprocess.Popen[str], begin: float) -> int | None:
        """Hears the worker out. The case that it has begun and not ended."""
        begun = None
        for text in worker.stdout or ():
            if not text.startswith("{"):
                continue  # what a library prints
            line = json.loads(text)
            begun = line["case"] if line["kind"] == "begins" else None
            if begun is None:
                self._next = line["case"] + self._stride
                self._part.take(line)
                self._part.seconds = time.monotonic() - begin
                self._told()
        return begun

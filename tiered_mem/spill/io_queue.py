"""The disk tier's threads for I/O, and the place where a model of a drive comes in."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import CancelledError
from functools import partial
from typing import Any, Protocol

from .filesystem import Files
from .lower_tier import Job

Run = Callable[[], None]
# Hears when a job that has run began and ended, in seconds of the queue's clock.
Told = Callable[[float, float], None]


class IoQueue:
    """Runs jobs on `workers` threads of its own: urgent ones first, others in their order.

    now: the seconds of its clock.
    """

    now = staticmethod(time.perf_counter)

    def __init__(self, workers: int, name: str) -> None:
        if workers < 1:
            raise ValueError(f"workers is {workers}, there must be at least 1")
        self._urgent: dict[IoJob, Run] = {}  # by age, the oldest first
        self._later: dict[IoJob, Run] = {}
        # `with` calls a function to take a condition. A signal whose handler raises in there would leave it taken.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._threads: list[threading.Thread] = []
        try:
            for number in range(workers):
                thread = threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.close()
            raise

    def submit(self, run: Run, *, urgent: bool, nbytes: int = 0, told: Told | None = None) -> IoJob:
        """Have one of the threads call `run`. Raises RuntimeError once closed."""
        job = IoJob()
        with self._lock:
            if self._closed:
                raise RuntimeError("the queue is closed")
            (self._urgent if urgent else self._later)[job] = partial(_timed, run, told) if told else run
            self._changed.notify()
        return job

    def cancel(self, job: IoJob) -> bool:
        """Cancel a job that is not urgent. False if it has begun. A cancelled job's error is CancelledError."""
        with self._lock:
            if self._later.pop(job, None) is None:
                return False
        job._end(CancelledError("it was given up before it began"))
        return True

    def close(self) -> None:
        """Cancel the jobs that are not urgent and have not begun, and end the threads after all others."""
        with self._lock:
            self._closed = True
            cancelled = list(self._later)
            self._later.clear()
            self._changed.notify_all()
        for job in cancelled:
            job._end(CancelledError("the disk tier was closed before it began"))
        for thread in self._threads:
            if thread is not threading.current_thread():  # where the last that holds the tier is a job of its own
                thread.join()

    def _work(self) -> None:
        while (work := self._next()) is not None:
            job, run = work
            error = _error_of(run)
            del work, run  # not to be kept alive by whoever waits for the job, or until the next one comes
            _clear(error)
            job._end(error)
            del job, error

    def _next(self) -> tuple[IoJob, Run] | None:
        with self._lock:
            while not self._urgent and not self._later:
                if self._closed:
                    return None
                self._changed.wait()
            jobs = self._urgent or self._later
            job = next(iter(jobs))
            return job, jobs.pop(job)


class IoJob:
    """An operation on the drive that a thread of the queue does."""

    def __init__(self) -> None:
        self._finished = threading.Event()
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not. Does not wait."""
        return self._finished.is_set()

    @property
    def error(self) -> Exception | None:
        """Its error. None while it is under way, and after success."""
        return self._error

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for its end, at most so many seconds. Whether it has ended. Raises nothing: see `error`."""
        return self._finished.wait(seconds)

    def _end(self, error: Exception | None) -> None:
        self._error = error
        self._finished.set()


class Queue(Protocol):
    """Has jobs run, and knows when each began and ended: an `IoQueue`, or that of a model."""

    def submit(self, run: Run, *, urgent: bool, nbytes: int, told: Told) -> Job:
        """Have `run` called, which moves so many bytes. urgent: it is a read, and else a write."""

    def cancel(self, job: Any) -> bool:
        """Cancel a job that is not urgent. False if it has begun. A cancelled job's error is CancelledError."""

    def now(self) -> float:
        """The seconds of the clock that `told` hears."""

    def close(self) -> None:
        """Cancel the jobs that are not urgent and have not begun, and end after all others."""


class Drive(Protocol):
    """A model of a drive. ascend_emulator has one."""

    def files(self, files: Files) -> Files:
        """What is to be used in place of these; they themselves where the bytes of a run matter."""

    def queue(self, threads: IoQueue) -> Queue:
        """A queue that runs its jobs on these threads, when the model says, and closes them."""


def _timed(run: Run, told: Told) -> None:
    began = time.perf_counter()
    try:
        run()
    finally:
        told(began, time.perf_counter())


def _error_of(run: Run) -> Exception | None:
    try:
        run()
    except Exception as error:
        return error
    except BaseException as error:
        return RuntimeError(f"ended by {error!r}")
    return None


def _clear(error: BaseException | None) -> None:
    """Empties the frames of an error, which hold its job: only the garbage collector could free both."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__

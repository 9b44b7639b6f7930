"""The disk tier's threads for I/O, and the time that it takes: the real drive's, or that of a model."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import CancelledError
from functools import partial
from typing import Protocol

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
        """Have one of the threads call `run`, which moves so many bytes. Raises RuntimeError once closed."""
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


class DriveQueue:
    """Runs jobs in the time that a modelled drive says.

    To the drive urgent jobs are reads, and others writes. A job runs when its time has come and somebody asks for
    it: on a thread of `queue`, while whoever asks waits. So all that comes of it follows from the order of the
    calls, and nothing from how fast threads are.

    queue: is closed with this one.
    """

    def __init__(self, drive: Drive, queue: IoQueue) -> None:
        self._drive = drive
        self._queue = queue
        self._under_way: dict[_DriveJob, Run] = {}
        self._cancelling = threading.Lock()
        self._running = threading.Lock()  # taken first
        self.now = drive.now

    def submit(self, run: Run, *, urgent: bool, nbytes: int, told: Told) -> IoJob:
        """Have `run` called when the drive has moved so many bytes."""
        job = _DriveJob(self._drive.submit(nbytes, read=urgent), urgent, self._finish)
        self._under_way[job] = partial(_told_times, run, told, job.operation)
        return job

    def cancel(self, job: IoJob) -> bool:
        """Cancel a job that is not urgent. False if it has begun. A cancelled job's error is CancelledError."""
        with self._cancelling:  # or another thread might run what the drive has just taken back
            if not isinstance(job, _DriveJob) or job.urgent or job not in self._under_way:
                return False
            if not job.operation.cancel():
                return False
            del self._under_way[job]
            job._end(CancelledError("it was given up before it began"))
            return True

    def close(self) -> None:
        """Cancel the jobs that are not urgent and have not begun, and end the threads after all others."""
        for job in list(self._under_way):
            self.cancel(job)
        for job in list(self._under_way):
            job.wait()
        self._queue.close()

    def _finish(self, job: _DriveJob) -> None:
        """Runs a job whose time has come, unless another thread has."""
        with self._running:
            with self._cancelling:
                run = self._under_way.get(job)
            if run is not None:
                # An interrupt of the wait leaves it under way, and the next who asks waits for the same run.
                job.real = job.real or self._queue.submit(run, urgent=True)
                job.real.wait()
                del self._under_way[job]
                job._end(job.real.error)


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


class _DriveJob(IoJob):
    """finish: ends it, when the operation has ended. real: what runs it."""

    def __init__(self, operation: DriveOperation, urgent: bool, finish: Callable[[_DriveJob], None]) -> None:
        super().__init__()
        self.operation = operation
        self.urgent = urgent
        self.real: IoJob | None = None
        self._finish = finish

    @property
    def done(self) -> bool:
        if not self._finished.is_set() and self.operation.done:
            self._finish(self)
        return self._finished.is_set()

    def wait(self, seconds: float | None = None) -> bool:
        if not self._finished.is_set() and self.operation.wait(seconds):
            self._finish(self)
        return self._finished.is_set()


class Drive(Protocol):
    """Says when operations on a drive end, in a time of its own, and moves no bytes. Any thread may call it.

    dry: whether nobody looks at any data, so that none need be moved.

    ascend_emulator has one.
    """

    @property
    def dry(self) -> bool: ...

    def submit(self, nbytes: int, *, read: bool) -> DriveOperation:
        """Begin to read or write so many bytes, when the drive comes to it."""

    def now(self) -> float:
        """The seconds of its clock."""


class DriveOperation(Protocol):
    """A read or a write that was submitted to a drive."""

    @property
    def done(self) -> bool:
        """Whether it has ended."""

    @property
    def times(self) -> tuple[float, float]:
        """When it began and ended, once it is done."""

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for its end, at most so many seconds of the drive's clock. Whether it has ended."""

    def cancel(self) -> bool:
        """Take it back, as if it had never been submitted. False if it has begun."""


def _timed(run: Run, told: Told) -> None:
    began = time.perf_counter()
    try:
        run()
    finally:
        told(began, time.perf_counter())


def _told_times(run: Run, told: Told, operation: DriveOperation) -> None:
    try:
        run()
    finally:
        told(*operation.times)


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

"""The modelled machine's drives: when reads and writes of files would begin and end."""

import ctypes
import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError
from functools import partial
from typing import Any

from ascend_emulator.errors import EmulatorError
from ascend_emulator.runtime import is_running, runtime
from ascend_emulator.timeline import now

_LONGEST_WAIT_S = 1e9
_ENDLESS = 1 << 50
_BLOCK = 4096

_log = logging.getLogger("ascend_emulator.drives")


class ModelledDrive:
    """Operations on a drive of the modelled server, which does one at a time, and reads before writes.

    It moves no bytes: whoever submits an operation does that, and shows them to nobody before it is done.

    number: which drive it is. The server has as many alike as are asked for, and each does its own operations
    beside the others'. All objects with one number stand for the same drive.
    dry: whether this is a dry run, in which there are no bytes to move.

    Raises EmulatorError without a device, without a clock, and for a server whose drives are not known, and
    ValueError for a number below 0.
    """

    def __init__(self, number: int = 0) -> None:
        if number < 0:
            raise ValueError(f"number is {number}; drives are counted from 0")
        self._number = number
        self._library = runtime()
        if not self._library.ascend_emulator_models_time():
            raise EmulatorError("a modelled drive needs modelled time: --clock CHIP (clock=...)")
        self.dry = bool(self._library.ascend_emulator_is_dry())
        if not self._library.ascend_emulator_has_drive():
            raise EmulatorError("the server's file has no [drives]: name another --server, or add them to one")

    def submit(self, nbytes: int, *, read: bool) -> "DriveOperation":
        """Begin to read or write so many bytes, when the drive is free. It costs the modelled host nothing."""
        return DriveOperation(self._library, self._number, nbytes, read)

    def now(self) -> float:
        """The modelled host's time in seconds."""
        return now()

    def queue(self, threads: Any) -> "DriveQueue":
        """A queue of jobs that take this drive's time. threads: run them, by `submit(run, urgent=True)`."""
        return DriveQueue(self, threads)

    def files(self, files: Any) -> Any:
        """Calls on files: those that are given, or in a dry run such as move next to no data."""
        return HollowFiles(files) if self.dry else files


class DriveOperation:
    """A read or a write that was submitted."""

    def __init__(self, library: ctypes.CDLL, drive: int, nbytes: int, read: bool) -> None:
        self._library = library
        submit = library.ascend_emulator_drive_submit
        submit.restype = ctypes.c_void_p
        self._handle = ctypes.c_void_p(submit(drive, int(read), ctypes.c_size_t(nbytes)))
        weakref.finalize(self, library.ascend_emulator_drive_forget, self._handle).atexit = False

    @property
    def done(self) -> bool:
        """Whether it has ended or was cancelled. To ask costs the modelled host a query."""
        return bool(self._library.ascend_emulator_drive_done(self._handle))

    def wait(self, seconds: float | None = None) -> bool:
        """Let the modelled host wait for the end, at most so many of its seconds. Whether it has ended."""
        most = -1 if seconds is None else round(min(max(seconds, 0.0), _LONGEST_WAIT_S) * 1e9)
        return bool(self._library.ascend_emulator_drive_wait(self._handle, ctypes.c_int64(most)))

    def cancel(self) -> bool:
        """Take it back. False if it has begun."""
        return bool(self._library.ascend_emulator_drive_cancel(self._handle))

    @property
    def times(self) -> tuple[float, float]:
        """When it began and ended, in seconds of the modelled host. Of no meaning before it is done."""
        began, ended = ctypes.c_int64(), ctypes.c_int64()
        self._library.ascend_emulator_drive_times(self._handle, ctypes.byref(began), ctypes.byref(ended))
        return began.value / 1e9, ended.value / 1e9


class DriveQueue:
    """Runs jobs in the time that a drive says.

    To the drive urgent jobs are reads, and others writes. A job runs when its time has come and somebody asks for
    it: on a thread of `threads`, while whoever asks waits. So all that comes of it follows from the order of the
    calls, and nothing from how fast threads are.

    threads: are closed with the queue.
    """

    def __init__(self, drive: ModelledDrive, threads: Any) -> None:
        self._drive = drive
        self._threads = threads
        self._under_way: dict[DriveJob, Callable[[], None]] = {}
        self._cancelling = threading.Lock()
        self._running = threading.Lock()  # taken first
        self.now = drive.now

    def submit(
        self, run: Callable[[], None], *, urgent: bool, nbytes: int, told: Callable[[float, float], None]
    ) -> "DriveJob":
        """Have `run` called when the drive has moved so many bytes. told: hears when that began and ended."""
        job = DriveJob(self._drive.submit(nbytes, read=urgent), urgent, self._finish)
        self._under_way[job] = partial(_told_times, run, told, job.operation)
        return job

    def cancel(self, job: "DriveJob") -> bool:
        """Cancel a job that is not urgent. False if it has begun. A cancelled job's error is CancelledError."""
        with self._cancelling:  # or another thread might run what the drive has just taken back
            if job.urgent or job not in self._under_way or not job.operation.cancel():
                return False
            del self._under_way[job]
            job.end(CancelledError("it was given up before it began"))
            return True

    def close(self) -> None:
        """Cancel the jobs that are not urgent and have not begun, and end the threads after all others."""
        for job in list(self._under_way):
            self.cancel(job)
        for job in list(self._under_way):
            job.wait()
        self._threads.close()

    def _finish(self, job: "DriveJob") -> None:
        """Runs a job whose time has come, unless another thread has."""
        with self._running:
            with self._cancelling:
                run = self._under_way.get(job)
            if run is not None:
                # An interrupt of the wait leaves it under way, and the next who asks waits for the same run.
                job.real = job.real or self._threads.submit(run, urgent=True)
                job.real.wait()
                del self._under_way[job]
                job.end(job.real.error)


class DriveJob:
    """A job of a DriveQueue.

    finish: ends it, when the operation has ended. real: what runs it. error: None while it is under way, and after
    success.
    """

    def __init__(self, operation: DriveOperation, urgent: bool, finish: Callable[["DriveJob"], None]) -> None:
        self._finish = finish
        self._ended = False
        self.operation = operation
        self.urgent = urgent
        self.real: Any = None
        self.error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        if not self._ended and self.operation.done:
            self._finish(self)
        return self._ended

    def wait(self, seconds: float | None = None) -> bool:
        """Let the modelled host wait for its end, at most so many of its seconds. Whether it has ended."""
        if not self._ended and self.operation.wait(seconds):
            self._finish(self)
        return self._ended

    def end(self, error: Exception | None) -> None:
        self.error = error
        self._ended = True


class HollowFiles:
    """Files of a run in which nobody looks at data: as long as others, with headers, and else with hardly anything.

    What begins a file is kept, and what is one block. Any other read leaves the memory as it is. Room never ends.
    """

    def __init__(self, files: Any) -> None:
        self._files = files

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def free_bytes(self, folder: int) -> int:
        return _ENDLESS

    def pread(self, fd: int, ptr: int, nbytes: int, offset: int) -> int:
        return int(self._files.pread(fd, ptr, nbytes, offset)) if _is_kept(nbytes, offset) else nbytes

    def pwrite(self, fd: int, ptr: int, nbytes: int, offset: int) -> int:
        return int(self._files.pwrite(fd, ptr, nbytes, offset)) if _is_kept(nbytes, offset) else nbytes

    def contents(self, ptr: int, nbytes: int) -> memoryview:
        """Of a piece of data: nothing, whatever its size."""
        return memoryview(b"")

    def allocate(self, fd: int, nbytes: int) -> None:
        self._files.truncate(fd, nbytes)


def offered_drive(number: int = 0) -> ModelledDrive | None:
    """What pyproject.toml offers as an entry point: the drive of that number, or None without a clock.

    None as well, after a warning, for a server whose drives are not known.
    """
    if not is_running() or not runtime().ascend_emulator_models_time():
        return None
    try:
        return ModelledDrive(number)
    except EmulatorError as error:
        _log.warning("files take the time of this machine, and no modelled one: %s", error)
        return None


def _is_kept(nbytes: int, offset: int) -> bool:
    return offset == 0 or nbytes <= _BLOCK


def _told_times(run: Callable[[], None], told: Callable[[float, float], None], operation: DriveOperation) -> None:
    try:
        run()
    finally:
        told(*operation.times)

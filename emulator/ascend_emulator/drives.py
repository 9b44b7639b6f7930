"""The modelled machine's drive: when reads and writes of files would begin and end."""

import ctypes
import logging
import weakref

from ascend_emulator.errors import EmulatorError
from ascend_emulator.runtime import is_running, runtime
from ascend_emulator.timeline import now

_LONGEST_WAIT_S = 1e9

_log = logging.getLogger("ascend_emulator.drives")


class ModelledDrive:
    """Operations on the drive of the modelled server, which does one at a time, and reads before writes.

    It moves no bytes: whoever submits an operation does that, and shows them to nobody before it is done. There is
    one drive: all objects of this class stand for it.

    dry: whether this is a dry run, in which there are no bytes to move.

    Raises EmulatorError without a device, without a clock, and for a server whose drives are not known.
    """

    def __init__(self) -> None:
        self._library = runtime()
        if not self._library.ascend_emulator_models_time():
            raise EmulatorError("a modelled drive needs modelled time: --clock CHIP (clock=...)")
        self.dry = bool(self._library.ascend_emulator_is_dry())
        if not self._library.ascend_emulator_has_drive():
            raise EmulatorError("the server's file has no [drives]: name another --server, or add them to one")

    def submit(self, nbytes: int, *, read: bool) -> "DriveOperation":
        """Begin to read or write so many bytes, when the drive is free. It costs the modelled host nothing."""
        return DriveOperation(self._library, nbytes, read)

    def now(self) -> float:
        """The modelled host's time in seconds."""
        return now()


class DriveOperation:
    """A read or a write that was submitted."""

    def __init__(self, library: ctypes.CDLL, nbytes: int, read: bool) -> None:
        self._library = library
        submit = library.ascend_emulator_drive_submit
        submit.restype = ctypes.c_void_p
        self._handle = ctypes.c_void_p(submit(int(read), ctypes.c_size_t(nbytes)))
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


def offered_drive() -> ModelledDrive | None:
    """What pyproject.toml offers as an entry point: the drive, or None without a clock.

    None as well, after a warning, for a server whose drives are not known.
    """
    if not is_running() or not runtime().ascend_emulator_models_time():
        return None
    try:
        return ModelledDrive()
    except EmulatorError as error:
        _log.warning("files take the time of this machine, and no modelled one: %s", error)
        return None

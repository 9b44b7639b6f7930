"""The emulated CANN runtime, as the package calls it."""

import ctypes
import os

from ascend_emulator.errors import EmulatorError
from ascend_emulator.libraries import runtime_library


def runtime() -> ctypes.CDLL:
    """The runtime that start() has loaded. Raises EmulatorError where there is none."""
    try:
        return ctypes.CDLL(str(runtime_library()), mode=os.RTLD_NOLOAD)
    except OSError:
        raise EmulatorError("this process has no emulated device; call ascend_emulator.start() first") from None


def is_running() -> bool:
    """Whether start() has loaded it in this process."""
    try:
        runtime()
    except EmulatorError:
        return False
    return True


def text_from(function: str) -> str:
    """What a function of the runtime returns that gives its caller a string to free."""
    library = runtime()
    call = getattr(library, function)
    call.restype = ctypes.c_void_p
    pointer = ctypes.c_void_p(call())
    try:
        return ctypes.string_at(pointer).decode()
    finally:
        library.ascend_emulator_free_text(pointer)

"""Calls of the runtime that fail because they were told to."""

import ctypes
import re
from dataclasses import dataclass

from ascend_emulator.errors import EmulatorError
from ascend_emulator.runtime import runtime

DEVICE = "device"
FUNCTIONS = (
    "aclrtMalloc",
    "aclrtMallocHost",
    "aclrtFreeHost",
    "aclrtHostRegister",
    "aclrtHostUnregister",
    "aclrtPointerGetAttributes",
    "aclrtMemcpy",
    "aclrtMemcpyAsync",
    "aclrtMemcpyBatch",
    "aclrtMemcpyBatchAsync",
    "aclrtCreateStream",
    "aclrtCreateEvent",
    "HcclCommInitRootInfo",
    "HcclAllReduce",
    "HcclAllGather",
    "HcclReduceScatter",
    "HcclBroadcast",
)
# What goes wrong while every call says that it went well; docs/faults.md says how.
SILENT = (
    "copy_h2d",
    "copy_d2h",
    "late_h2d",
    "late_d2h",
    "blocking_h2d",
    "blocking_d2h",
    "endless_h2d",
    "endless_d2h",
    "lost_wait",
    "unpinned",
)
_FORM = (
    '"aclrtMalloc:3" (the third call fails), "aclrtMalloc:p=0.01,seed=7" (each call fails with that probability) '
    'or "device:100" (the device is lost with the 100th operation); ",code=N" at the end sets the error code'
)


@dataclass(frozen=True)
class Fault:
    """One way in which the device fails.

    function: one of FUNCTIONS, whose variants (aclrtMallocHostWithCfg and the like) count as calls of it; or
        "device", which counts the operations that are put on streams. A device stays lost until clear_faults(). Or
        an operator such as "aclnnGelu", which does not fail: the last bit of the first element that it writes is
        another one, as with a kernel whose result depends on timing. Or one of SILENT, such as "late_h2d", which
        does not fail either.
    nth: the call that fails, counted from 1. It fails once.
    probability: that of each call, in (0, 1], drawn from `seed`. Either this or nth is given.
    code: what the call returns; None is what CANN returns in such a case.

    Raises EmulatorError for values that mean nothing.
    """

    function: str
    nth: int | None = None
    probability: float | None = None
    seed: int | None = None
    code: int | None = None

    def __post_init__(self) -> None:
        kernel = self.function.startswith("aclnn")
        if self.function not in (*FUNCTIONS, DEVICE, *SILENT) and not kernel:
            raise EmulatorError(
                f"{self.function!r} cannot be told to fail; known are {', '.join(FUNCTIONS)}, {DEVICE!r}, and "
                f"operators such as 'aclnnGelu', which come to other bits, and {', '.join(SILENT)}. "
                "A variant of one of these counts as that one"
            )
        if (self.nth is None) == (self.probability is None):
            raise EmulatorError(f"a fault of {self.function} needs either nth or a probability")
        if self.nth is not None and not 1 <= self.nth < 1 << 64:
            raise EmulatorError(f"the calls of {self.function} are counted from 1, so nth cannot be {self.nth}")
        if self.probability is not None and not 0 < self.probability <= 1:
            raise EmulatorError(f"a probability is above 0 and at most 1, not {self.probability}")
        if self.seed is not None and (self.probability is None or not 0 <= self.seed < 1 << 64):
            raise EmulatorError(f"a seed is at least 0 and belongs to a probability; {self.seed} cannot be used")
        if self.code is not None and not 0 < self.code < 1 << 31:
            raise EmulatorError(f"an error code is above 0, not {self.code}")
        if self.code is not None and kernel:
            raise EmulatorError(f"{self.function} comes to other bits, and returns no error code")
        if self.code is not None and self.function in SILENT:
            raise EmulatorError(f"{self.function} goes wrong in silence, and returns no error code")

    @classmethod
    def parse(cls, text: str) -> "Fault":
        """A fault from a text such as "aclrtMalloc:3", "aclrtMemcpyAsync:p=0.01,seed=7" or "device:100,code=7"."""
        match = re.fullmatch(r"(\w+):(?:(\d+)|p=([0-9.]+(?:e-\d+)?)(?:,seed=(\d+))?)(?:,code=(\d+))?", text)
        if match is None:
            raise EmulatorError(f"{text!r} is not a fault; write it like {_FORM}")
        function, nth, probability, seed, code = match.groups()
        try:
            chance = None if probability is None else float(probability)
        except ValueError:
            raise EmulatorError(f"{text!r} is not a fault: {probability!r} is not a probability") from None
        nth, seed, code = (None if digits is None else int(digits) for digits in (nth, seed, code))
        return cls(function, nth=nth, probability=chance, seed=seed, code=code)

    def __str__(self) -> str:
        """The text that parse() reads."""
        when = str(self.nth) if self.probability is None else f"p={float(self.probability)!r}"
        seed = "" if self.seed is None else f",seed={self.seed}"
        code = "" if self.code is None else f",code={self.code}"
        return f"{self.function}:{when}{seed}{code}"


def inject(fault: Fault | str) -> None:
    """Tells a function to fail, counting its calls from now on. It replaces a fault that the function has already.

    Raises EmulatorError where the text means nothing, or the process has no emulated device.
    """
    if isinstance(fault, str):
        fault = Fault.parse(fault)
    known = runtime().ascend_emulator_set_fault(
        ctypes.c_char_p(fault.function.encode()),
        ctypes.c_uint64(fault.nth or 0),
        ctypes.c_double(fault.probability or 0),
        ctypes.c_uint64(fault.seed or 0),
        ctypes.c_int(fault.code or 0),
    )
    if not known:
        raise EmulatorError(f"the emulated runtime cannot let {fault.function} fail")


def clear_faults() -> None:
    """Nothing fails any more, and a device that was lost works again. What it has not run stays undone."""
    runtime().ascend_emulator_clear_faults()

"""What the race detector found, and the stacks of the Python code that caused it."""

import atexit
import ctypes
import json
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal

from ascend_emulator.errors import EmulatorError
from ascend_emulator.runtime import is_running, runtime, text_from

_DEPTH = 24
_SHOWN = 8
# The launcher, and what it runs the program by.
_NOT_THE_PROGRAM = (str(Path(__file__).parent), "<frozen runpy>")


@dataclass(frozen=True)
class Access:
    """One side of a race: what used `nbytes` bytes from `begin` on.

    operation: a copy ("copy_h2d"), a kernel ("aclnnAdd"), a function of the runtime ("aclrtFreeHost"), a CPU
        operator on pinned memory ("aten::sum"), or a declared use.
    stream: its number in the runtime; None for the host.
    stack: where the program issued it, innermost call last. Empty on threads that run no Python, such as
        backward's, and of a free.
    time: when it was issued, in seconds on the clock of now(); None where time is not modelled.
    """

    operation: str
    stream: int | None
    touch: Literal["read", "write", "free"]
    begin: int
    nbytes: int
    stack: traceback.StackSummary
    time: float | None = None

    def __str__(self) -> str:
        where = "the host" if self.stream is None else f"stream {self.stream}"
        what = {"read": "reads", "write": "writes", "free": "frees"}[self.touch]
        head = f"{self.operation} on {where} {what} {self.nbytes} bytes at {self.begin:#x}"
        if self.time is not None:
            head += f", issued at {self.time * 1e6:.3f} us"
        return "\n".join(
            [head, *"".join(traceback.StackSummary.from_list(self.stack[-_SHOWN:]).format()).splitlines()]
        )


@dataclass(frozen=True)
class Race:
    """Two uses of the same bytes that nothing orders, one of which changes them.

    freed: how torch's allocator took the memory back between the two, which are then uses of two tensors. Its
        stream is the one that the memory belongs to.
    count: how often the two places in the program came together so.
    """

    first: Access
    second: Access
    freed: Access | None
    count: int

    def __str__(self) -> str:
        times = "once" if self.count == 1 else f"{self.count} times"
        text = f"race ({times}): {self.first}\nis not ordered with what was issued after it:\n{self.second}"
        if self.freed is None:
            return text
        return f"{text}\nThe memory was given to another tensor in between:\n{self.freed}"


def races() -> list[Race]:
    """The races found so far, each pair of places once. Raises EmulatorError while the detector is off."""
    if not runtime().ascend_emulator_watches_races():
        raise EmulatorError("the race detector is off; start with races=True (--races)")
    return [
        Race(
            _access(each["first"]), _access(each["second"]), each["freed"] and _access(each["freed"]), each["count"]
        )
        for each in json.loads(text_from("ascend_emulator_races"))
    ]


def clear_races() -> None:
    """Forgets the races found so far."""
    runtime().ascend_emulator_clear_races()


@contextmanager
def host_access(pointer: int, nbytes: int, *, write: bool, what: str = "host_access") -> Iterator[None]:
    """Tells the detector that the host uses pinned memory, in a way that neither torch nor the runtime sees.

    Such as a file that is written from a buffer: `with host_access(ptr, nbytes, write=False): os.pwrite(...)`. What
    is issued meanwhile must be ordered with it too. Without the detector, and without an emulated device, this does
    nothing.
    """
    _declare(what, pointer, nbytes, write)
    yield
    _declare(what, pointer, nbytes, write)


def _declare(what: str, pointer: int, nbytes: int, write: bool) -> None:
    if is_running():
        begin, size = ctypes.c_void_p(pointer), ctypes.c_size_t(nbytes)
        runtime().ascend_emulator_host_access(what.encode(), begin, size, write)


def _access(raw: dict[str, Any]) -> Access:
    return Access(
        operation=raw["operation"],
        stream=raw["stream"] or None,
        touch=raw["touch"],
        begin=raw["begin"],
        nbytes=raw["nbytes"],
        stack=_SITES.stack(raw["site"]),
        time=None if raw["time"] < 0 else raw["time"] / 1e9,
    )


class _Sites:
    """Numbers for the stacks that the runtime asks for: it keeps a number with each use of memory."""

    def __init__(self) -> None:
        # By where in which code each frame is, and by its line. A code's hash reads all of it, so codes go by their
        # ids, which no others get while a stack keeps them.
        self._numbers: dict[tuple[int, ...], int] = {}
        self._by_line: dict[tuple[tuple[int, int], ...], int] = {(): 0}
        self._stacks: list[list[tuple[CodeType, int]]] = [[]]
        self._callback = ctypes.CFUNCTYPE(ctypes.c_int)(self._ask)

    def serve(self) -> None:
        """Lets the runtime ask, until Python ends."""
        tell = runtime().ascend_emulator_ask_for_site
        tell(self._callback)
        atexit.register(tell, None)

    def stack(self, number: int) -> traceback.StackSummary:
        frames = [
            traceback.FrameSummary(code.co_filename, line, code.co_name, lookup_line=False)
            for code, line in self._stacks[number]
            if not code.co_filename.startswith(_NOT_THE_PROGRAM)
        ]
        return traceback.StackSummary.from_list(reversed(frames))

    def _ask(self) -> int:
        where: list[int] = []
        first = frame = sys._getframe().f_back
        while frame is not None and len(where) < 2 * _DEPTH:
            where += (id(frame.f_code), frame.f_lasti)
            frame = frame.f_back
        key = tuple(where)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = self._number(first)
        return number

    def _number(self, frame: FrameType | None) -> int:
        """The number of the lines that the frames are in, which several calls in one of them share."""
        parts: list[tuple[CodeType, int]] = []
        while frame is not None and len(parts) < _DEPTH:
            parts.append((frame.f_code, frame.f_lineno or 0))
            frame = frame.f_back
        key = tuple((id(code), line) for code, line in parts)
        number = self._by_line.setdefault(key, len(self._stacks))
        if number == len(self._stacks):
            self._stacks.append(parts)
        return number


# The runtime is one for the whole process, and so are the stacks it knows by number.
_SITES = _Sites()


def name_places() -> None:
    """From now on races come with the stacks that caused them."""
    _SITES.serve()

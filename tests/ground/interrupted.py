"""Signals at each line of the product's code, what they find, and a training in which they come."""

from __future__ import annotations

import ast
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from tests.models import Stack
from tiered_mem import TieringManager
from tiered_mem.ground.interrupts import Interrupts, keepers
from tiered_mem.policies import LRUPolicy

ROOT = Path(__file__).parents[2]
FOLDERS = tuple(str(ROOT / folder) + "/" for folder in ("tiered_mem", "allocators", "policies"))
SIGNAL = signal.SIGUSR2
TIMES = 10  # a line is reached in several ways


class Interrupt(BaseException):
    """What the handler raises."""


class Sweep:
    """Sends this thread a signal before each line of the product's code that a run comes to, the first few times.

    lines: how many signals there were.
    inside: the functions in which the handler was called, and not kept waiting.
    alone: functions that kept it waiting when no other in the stack would have, as "/path/to/manager.py:87", each
        with the function in which the handler would have been called then.
    """

    def __init__(self) -> None:
        self.lines = 0
        self.inside: set[str] = set()
        self.alone: set[tuple[str, str]] = set()
        self._asking = False
        self._times: Counter[tuple[CodeType, int]] = Counter()

    def run(self, work: Callable[[], object]) -> None:
        self._times.clear()
        before = signal.signal(SIGNAL, self._handler)
        # So that a manager that is made or closed meanwhile finds the handler held back, and leaves it so.
        interrupts = Interrupts()
        interrupts.watch()
        outer = sys.gettrace()
        sys.settrace(self._trace)
        try:
            work()
        finally:
            sys.settrace(outer)
            interrupts.close()
            signal.signal(SIGNAL, before)

    def _handler(self, number: int, frame: FrameType | None) -> None:
        if self._asking:  # and not one that comes again, later
            self._asking = False
            raise Interrupt

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if not _is_product(frame):
            return None
        place = frame.f_code, frame.f_lineno
        self._times[place] += 1
        if self._times[place] > TIMES:
            return self._trace
        self.lines += 1
        try:
            self._asking = True
            signal.raise_signal(SIGNAL)
            self._asking = False  # one that comes again while the stack is looked at would leave this function
        except Interrupt:
            self.inside.add(name_of(frame.f_code))
        else:
            keeping = [*keepers(frame)]
            if len(keeping) == 1:
                keeper = f"{keeping[0].co_filename}:{keeping[0].co_firstlineno}"
                self.alone.add((keeper, name_of(frame.f_code)))
        finally:
            self._asking = False
        return self._trace


def name_of(code: CodeType) -> str:
    """As "context.py:__enter__"."""
    return f"{Path(code.co_filename).name}:{code.co_name}"


def marked() -> set[str]:
    """The functions of the product that are marked `@uninterrupted`, as "/path/to/manager.py:87"."""
    return {
        f"{file}:{function.decorator_list[0].lineno}"  # where its code begins
        for folder in FOLDERS
        for file in Path(folder).rglob("*.py")
        for function in ast.walk(ast.parse(file.read_text()))
        if isinstance(function, ast.FunctionDef)
        if any(isinstance(mark, ast.Name) and mark.id == "uninterrupted" for mark in function.decorator_list)
    }


def _is_product(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(FOLDERS) and not file.endswith("/interrupts.py")


def spilling_manager(place: str, tmp_path: Path) -> TieringManager:
    return TieringManager(
        policy=LRUPolicy(device_bytes="8KiB"),
        device=place,
        host_bytes="256KiB",
        spill_dir=tmp_path,
        spill_bytes="16MiB",
        trace=True,
    )


def train(manager: TieringManager, model: Stack, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    with manager.offload_context(model.layers, min_bytes=1):
        loss = model(x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

"""Steps that are watched: the most that each takes, where in it that is, and all that is said meanwhile."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from tests.fuzz_budget.witness import Witness


@dataclass(frozen=True)
class Step:
    """What was seen of one step.

    kind: steps of the same kind do the same. where: the part of the step in which it took the most. peak: in bytes.
    requested: the same without what torch's pool gave on top. told: what torch says of the peak in the end.
    forwards: how many with gradients there were. said: the warnings until the step ended. blocks: whether it saved
    anything that could move.
    """

    number: int
    kind: str
    where: str
    peak: int
    requested: int
    told: int
    forwards: int = 1
    said: tuple[str, ...] = ()
    blocks: bool = True


@dataclass
class Watch:
    """Makes a `Step` of each step that is taken inside `step()`, and of the one that an exception ends.

    blocks: tells how many blocks there have been.
    """

    witness: Witness
    blocks: Callable[[], int] = lambda: 0
    steps: list[Step] = field(default_factory=list)
    _said: list[str] = field(default_factory=list)
    _where: str = ""
    _forwards: int = 0

    @contextmanager
    def step(self, kind: str) -> Iterator[None]:
        self._where, self._forwards = "", 0
        self.witness.begin()
        blocks = self.blocks()
        try:
            yield
        finally:
            told, peak, requested = torch.npu.max_memory_allocated(), self.witness.peak(), self.witness.requested()
            said, self._said[:] = tuple(self._said), []
            some = self.blocks() > blocks
            step = Step(len(self.steps), kind, self._where, peak, requested, told, self._forwards, said, some)
            self.steps.append(step)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of a step. An exception ends it like anything else."""
        before = self.witness.peak()
        self._forwards += name == "training"
        try:
            yield
        finally:
            if self.witness.peak() > before or not self._where:
                self._where = name

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hears all warnings, logged or not. What is said beside steps counts for the next one."""
        handler = _Handler(self._said)
        logger = logging.getLogger("tiered_mem")
        logger.addHandler(handler)
        logger.propagate = False
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.showwarning = lambda message, *where, **more: self._said.append(str(message))
                yield
        finally:
            logger.propagate = True
            logger.removeHandler(handler)


class _Handler(logging.Handler):
    def __init__(self, said: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(record.getMessage())

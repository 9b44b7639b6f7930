"""How long the steps of a training take on the device, from position to position."""

from __future__ import annotations

from collections import deque
from math import fsum

from ..device.device import Device
from ..device.transfer import Direction, TransferEngine
from ..policies.base import StepMeasured
from .recorder import Trace
from .records import Copy, Mark, TraceRecord, Wait

_MOST_PENDING = 1_000_000  # nobody waits for a measurement


class StepMeter:
    """Measures steps that are marked position by position.

    trace: the one that the engine has for good. Without one, it has one while a step is measured.
    """

    def __init__(self, device: Device, engine: TransferEngine, trace: Trace | None) -> None:
        self._device = device
        self._engine = engine
        self._trace = trace
        self._now: _Times | None = None
        self._ended: deque[_Times] = deque()

    def begin(self, step: int) -> None:
        """The step is to be measured from its next position on, if it is not measured already."""
        if self._now is not None:
            return
        trace = self._trace or Trace(self._device, limit=1, pending=_MOST_PENDING, aligned=False)
        self._engine.trace = trace
        self._now = _Times(step, trace)

    def position(self) -> None:
        """The step that is measured, if one is, has come to its next position."""
        if self._now is not None:
            self._now.position()

    def end(self) -> None:
        """The step is over."""
        times, self._now = self._now, None
        if times is not None:
            times.position()
            times.over = True
            self._ended.append(times)
            self._engine.trace = self._trace

    def measured(self, *, wait: bool = False) -> StepMeasured | None:
        """The oldest step that has been measured and not been told.

        wait: until the device is through with it. Raises DeviceFailed then.
        """
        if self._ended:
            self._ended[0].trace.poll(wait=wait)
            if self._ended[0].complete:
                return self._ended.popleft().told()
        return None


class _Times:
    """One step: its positions, the last of which is its end, and what there was between them."""

    def __init__(self, step: int, trace: Trace) -> None:
        self.trace = trace
        self.over = False
        self._step = step
        self._positions = 0
        self._at: list[float] = []
        self._stalls: list[float] = []
        self._seconds: dict[Direction, float] = {"offload": 0.0, "reload": 0.0}
        self._nbytes: dict[Direction, int] = {"offload": 0, "reload": 0}
        trace.observers.append(self._see)

    def position(self) -> None:
        self._positions += 1
        self.trace.mark(self)

    @property
    def complete(self) -> bool:
        return len(self._at) == self._positions

    def told(self) -> StepMeasured:
        self.trace.observers.remove(self._see)
        compute = [
            max(0.0, end - begin - stall)
            for begin, end, stall in zip(self._at, self._at[1:], self._stalls, strict=False)
        ]
        rates = [self._nbytes[way] / seconds if seconds > 0 else 0.0 for way, seconds in self._seconds.items()]
        out, back = rates
        return StepMeasured(self._step, compute, fsum(self._stalls), out, back, self._stalls[: len(compute)])

    def _see(self, record: TraceRecord) -> None:
        if isinstance(record, Mark) and record.of is self:
            self._at.append(record.times[0])
            self._stalls.append(0.0)
        if not self._at or (self.over and self.complete):
            return  # a trace of the user's goes on
        match record:
            case Wait():
                self._stalls[-1] += record.stall
            case Copy(direction, nbytes):
                self._seconds[direction] += record.seconds
                self._nbytes[direction] += nbytes

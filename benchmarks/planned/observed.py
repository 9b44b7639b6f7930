"""What a step does when nothing moves, and a policy that plays decisions made beforehand."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tiered_mem.policies.actions import Action
from tiered_mem.policies.base import (
    Event,
    ExactMemory,
    Memory,
    OnRequest,
    Policy,
    Refused,
    StepBegin,
    StepEnd,
    StepMeasured,
    Used,
)
from tiered_mem.policies.planning.profile import Profile
from tiered_mem.policies.planning.recording import Recording, StepNames
from tiered_mem.policies.planning.step import StepUnderWay
from tiered_mem.policies.planning.table import Table

_UNTOLD = (Memory, StepMeasured, Refused, StepBegin, StepEnd)


class ObservingPolicy(Policy):
    """Moves nothing, and keeps what it hears of each step that was measured.

    recording: of the last of them; None before there is one. profiles: of all. measured: of each by its number what
    was recorded, and the seconds of its positions.
    """

    gather_bytes = 1
    asks: Collection[type[OnRequest]] = (Used, StepBegin, StepEnd, ExactMemory, StepMeasured)

    def __init__(self) -> None:
        self.recording: Recording | None = None
        self.measured: dict[int, tuple[Recording, Sequence[float]]] = {}
        self.profiles: list[Profile] = []
        self._own: dict[int, int] = {}
        self._device = self._number = 0
        self._step: StepUnderWay | None = None
        self._ended: dict[int, Recording] = {}

    @property
    def place(self) -> tuple[int, int]:
        """The number of the step that goes on, or was the last, and its positions so far."""
        return self._number, 0 if self._step is None else len(self._step.recording.names)

    def decide(self, event: Event) -> Sequence[Action]:
        match event:
            case StepBegin(number):
                self._own.clear()
                self._step, self._number = StepUnderWay(number), number
            case StepEnd(number) if self._step is not None:
                self._ended[number] = self._step.recording
                self._step = None
            case StepMeasured(number, seconds):
                self.recording = self._ended.pop(number)
                self.measured[number] = self.recording, seconds
                self.profiles.append(self.recording.profile(seconds)[0])
            case Memory(device):
                self._device = device
                if self._step is not None:
                    self._step.hear(event, sum(self._own.values()))
            case _ if self._step is not None:
                self._hear(event, self._step)
        return ()

    def _hear(self, event: Event, step: StepUnderWay) -> None:
        self._own.update(getattr(event, "blocks", ()))
        for key in getattr(event, "keys", ()):
            self._own.pop(key, None)
        step.take(event, self._device - sum(self._own.values()))


class PlayingPolicy(Policy):
    """Answers each event of each step with what a table has for it."""

    gather_bytes = 1
    asks: Collection[type[OnRequest]] = (Used, StepBegin)

    def __init__(self, table: Table) -> None:
        self._table = table
        self._names = StepNames()

    def decide(self, event: Event) -> Sequence[Action]:
        if isinstance(event, StepBegin):
            self._names = StepNames()
        elif not isinstance(event, _UNTOLD):
            return self._table.actions(self._names.event(event), self._names)
        return ()

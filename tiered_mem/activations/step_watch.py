"""What policies are told on request of a step: when it begins and ends, and how long it took."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ..device import Device
from ..policies.base import Event, ForwardBegin, ForwardEnd, HostPressure, Memory, StepBegin, StepEnd, StepMeasured
from ..trace.step_meter import StepMeter
from ..transfer import TransferEngine
from .block import SavedBlocks

# A program that lets no graph go has a step that never ends, and whoever records it would record for ever.
_MOST_EVENTS = 200_000


class StepWatch:
    """Follows the events that a policy is told. One thread at a time.

    A step begins with a forward that finds no block alive and no other forward under way, and ends where the next
    one begins: so its optimizer, and all else in between, are part of it.
    """

    def __init__(self, device: Device, engine: TransferEngine, blocks: SavedBlocks) -> None:
        self._device = device
        self._blocks = blocks
        self._meter = StepMeter(device, engine)
        self._number: int | None = None
        self._begun = 0
        self._events = 0
        self._forwards: set[int] = set()
        self._highest = 0

    def before(self, event: Event) -> list[Event]:
        """What is to be told before an event: a step that was measured, ended, or begins."""
        told: list[Event] = []
        if (measured := self._meter.measured()) is not None:
            told.append(measured)
        if isinstance(event, ForwardBegin):
            if not self._forwards and (not self._blocks.by_key or self._events > _MOST_EVENTS):
                if self._number is not None:
                    told.append(StepEnd(self._number))
                told.append(StepBegin(self._begun))
            self._forwards.add(event.graph)
        elif isinstance(event, ForwardEnd):
            self._forwards.discard(event.graph)
        return told

    def memory(self) -> Memory:
        """What is allocated on the device, and the most since the last event was answered.

        Only while a step is measured is torch's own peak reset, which users may want to read. Otherwise the most is
        known where torch's peak has risen.
        """
        allocated, peak = self._device.allocated_and_peak()
        most = peak if self._meter.measuring or peak > self._highest else allocated
        self._highest = peak
        return Memory(allocated, most)

    def answered(self) -> None:
        """What the policy has answered to an event is done."""
        if self._meter.measuring:
            self._device.reset_peak()
            self._highest = 0

    def note(self, event: Event, asks: Collection[type[Any]]) -> None:
        """The event is told now, or would be, to a policy that asks for these."""
        match event:
            case StepBegin(number):
                self._number, self._begun, self._events = number, number + 1, 0
                if StepMeasured in asks:
                    self._meter.begin(number)
            case StepEnd():
                self._number = None
                self._meter.end()
            case StepMeasured() | HostPressure():
                pass
            case _ if self._number is not None:
                self._events += 1
                self._meter.position()

"""What policies are told on request of a step: when it begins and ends, and how long it took."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from ..device import Device
from ..policies.base import (
    Event,
    ExactMemory,
    ForwardBegin,
    ForwardEnd,
    HostPressure,
    Memory,
    Saved,
    StepBegin,
    StepEnd,
    StepMeasured,
)
from ..trace.step_meter import StepMeter
from ..transfer import TransferEngine
from .block import SavedBlocks, held_by_others

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
        self._exact = False  # whether torch's peak has begun anew after the last answer
        self._held: dict[int, None] = {}  # the blocks of a step with exact memory that others may have

    def before(self, event: Event) -> Iterator[Event]:
        """What is to be told before an event: a step that was measured, ended, or begins.

        Each is to be noted and told before the next is asked for.
        """
        if (measured := self._meter.measured()) is not None:
            yield measured
        if isinstance(event, ForwardBegin):
            if not self._forwards and (not self._blocks.by_key or self._events > _MOST_EVENTS):
                if self._number is not None:
                    wait = self._exact
                    yield StepEnd(self._number)
                    while (measured := self._meter.measured(wait=wait)) is not None:
                        yield measured
                yield StepBegin(self._begun)
            self._forwards.add(event.graph)
        elif isinstance(event, ForwardEnd):
            self._forwards.discard(event.graph)

    def memory(self, asks: Collection[type[Any]]) -> Memory | None:
        """What is allocated on the device, and the most since the last event was answered, for who asks for it."""
        if Memory not in asks and ExactMemory not in asks:
            return None
        allocated, peak, reserved = self._device.memory()
        if self._exact:
            alive = filter(None, map(self._blocks.find, self._held))
            self._held = {block.key: None for block in held_by_others(alive)}
            return ExactMemory(allocated, peak, reserved, frozenset(self._held))
        most = peak if peak > self._highest else allocated
        self._highest = peak
        return Memory(allocated, most, reserved)

    def answered(self, asks: Collection[type[Any]]) -> None:
        """What the policy has answered to an event is done, and now it asks for these."""
        exact = ExactMemory in asks
        if exact:
            self._device.reset_peak()
        if exact or self._exact:
            self._highest = 0
        self._exact = exact

    def note(self, event: Event, asks: Collection[type[Any]]) -> None:
        """The event is told now, or would be, to a policy that asks for these."""
        match event:
            case StepBegin(number):
                self._number, self._begun, self._events = number, number + 1, 0
            case StepEnd():
                self._number = None
                self._meter.end()
            case StepMeasured() | HostPressure():
                pass
            case _ if self._number is not None:
                self._events += 1
                if self._exact and isinstance(event, Saved):
                    self._held.update(dict.fromkeys(key for key, _ in event.blocks))
                if StepMeasured in asks:
                    self._meter.begin(self._number)
                self._meter.position()

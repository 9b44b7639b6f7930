"""What policies are told on request of a step: when it begins and ends, and how long it took."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from ..device.device import Device
from ..device.peak import DevicePeak
from ..device.torch_private import call_after_backward, current_backward
from ..device.transfer import TransferEngine
from ..ground.interrupts import uninterrupted
from ..ground.stats import Counters, Reason
from ..ground.turn import Turn
from ..policies.base import (
    BOUNDARIES,
    Event,
    ExactMemory,
    ForwardBegin,
    ForwardEnd,
    HostPressure,
    LayerMemory,
    Memory,
    MoreBlocks,
    Saved,
    StepBegin,
    StepEnd,
    StepMeasured,
    Used,
)
from ..trace.recorder import Trace
from ..trace.step_meter import StepMeter
from .block import Block, SavedBlocks, held_by_others
from .movable import WORDS

# A program that lets no graph go has a step that never ends, and whoever records it would record for ever.
_MOST_EVENTS = 200_000


class StepWatch:
    """Follows the events that a policy is told. One thread at a time.

    A step begins with a forward that finds no block alive and no other forward under way, and ends where the next
    one begins: so its optimizer, and all else in between, are part of it.

    turn: is taken when a backward ends. counters: of what stays on the device. trace: that of
    the engine.
    """

    def __init__(
        self,
        device: Device,
        peak: DevicePeak,
        engine: TransferEngine,
        blocks: SavedBlocks,
        turn: Turn[Block],
        counters: Counters,
        trace: Trace | None,
    ) -> None:
        self._peak = peak
        self._counters = counters
        self._stayed: dict[Reason, int] = {}  # when the step began
        self._blocks = blocks
        self._turn = turn
        self._meter = StepMeter(device, engine, trace)
        self._number: int | None = None
        self._begun = 0
        self._events = 0
        self._forwards: set[int] = set()
        self._exact = False  # whether torch's peak has begun anew after the last answer
        self._backward = -1  # the last of torch's backwards whose end will be seen
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
                    yield StepEnd(self._number, self._stayed_since())
                    while (measured := self._meter.measured(wait=wait)) is not None:
                        yield measured
                yield StepBegin(self._begun)
            self._forwards.add(event.graph)
        elif isinstance(event, ForwardEnd):
            self._forwards.discard(event.graph)

    def memory(self, event: Event, asks: Collection[type[Any]]) -> Memory | None:
        """What is allocated on the device, and the most since the last event was answered, for who asks for it."""
        at_layers = LayerMemory in asks
        if type(event) not in BOUNDARIES if at_layers else Memory not in asks and ExactMemory not in asks:
            return None
        allocated, peak, reserved, acting = self._peak.read()
        if self._exact:
            alive = filter(None, map(self._blocks.find, self._held))
            self._held = {block.key: None for block in held_by_others(alive)}
            return ExactMemory(allocated, peak, reserved, frozenset(self._held), acting)
        return (LayerMemory if at_layers else Memory)(allocated, peak, reserved)

    def answered(self, asks: Collection[type[Any]]) -> None:
        """What the policy has answered to an event is done, and now it asks for these."""
        self._exact = ExactMemory in asks
        # Where nothing can move any more, nobody has to know all that comes and goes.
        if self._exact and (self._forwards or self._blocks.by_key):
            self._peak.begin_anew()
        else:
            self._peak.restore()

    def note(self, event: Event, asks: Collection[type[Any]]) -> None:
        """The event is told now, or would be, to a policy that asks for these."""
        match event:
            case StepBegin(number):
                self._number, self._begun, self._events = number, number + 1, 0
                self._stayed = {reason: moved.nbytes for reason, moved in self._counters.stayed.items()}
            case StepEnd():
                self._number = None
                self._meter.end()
            case StepMeasured() | MoreBlocks() | HostPressure():
                pass
            case _ if self._number is not None:
                if self._exact and isinstance(event, Used):
                    self._await_end()
                self._events += 1
                if self._exact and isinstance(event, Saved):
                    self._held.update(dict.fromkeys(key for key, _ in event.blocks))
                if StepMeasured in asks:
                    self._meter.begin(self._number)
                self._meter.position()

    def _stayed_since(self) -> dict[str, int]:
        """The bytes of saved tensors that no policy heard of in this step, by reason."""
        now = {reason: moved.nbytes - self._stayed[reason] for reason, moved in self._counters.stayed.items()}
        return {WORDS[reason]: n for reason, n in now.items() if n > 0 and reason not in ("no_room", "policy")}

    def _await_end(self) -> None:
        """What comes after the backward is the user's, and the user may ask torch for the peak."""
        task = current_backward()
        if task not in (-1, self._backward):
            self._backward = task
            call_after_backward(self._backward_ends)

    @uninterrupted
    def _backward_ends(self) -> None:
        with self._turn:
            self._peak.restore()

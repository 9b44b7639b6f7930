"""One step of training, as a policy follows it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from ..actions import Action, Release
from ..base import Dropped, Event, ExactMemory, ForwardBegin, ForwardEnd, LayerBegin, Memory, Saved, Used
from .recording import Name, Recording, StepNames
from .repertoire import COMPARED, Known, Variant
from .script import Repetition, Transcript
from .stitching import Choice
from .table import Table


@dataclass
class StepUnderWay:
    """A step that goes on, or has ended.

    choice: how its layers are treated. again: gives the bytes that come when one of them is computed again. Only a
    step without a plan asks.
    like: of another step, what may come beside its blocks.
    known, variant, table: what it is taken for, how it differs, and what it plays; None while nothing suits.
    compared: so many of the first blocks show what it is. undecided: the last event may show that: the first, the
    first block, the last of those, and one that its kind does not have.
    planned: the last event that the plan has, and the bytes beside blocks then: what it has for the time until its
    next event holds for events between them that it does not have.
    returning: the keys of blocks whose reload is due. sizes: of the blocks so far. in_use: the blocks that backward
    has used since its last layer began.
    peak: the most bytes of all that was allocated at a time, known when it has ended. update: the same while
    optimizers stepped, without their states that stay. allocated, reserved: the most
    that was at an event, and with what lay between tensors. passing: no later step is like it, as optimizer states
    have come to stay or left for good, or smaller tensors are blocks from now on. rise: the most that came from one
    event to the next. exact: whether memory is told with all that comes and goes. varies: whether a block has
    another size than in the recorded step. held: the blocks whose release would free nothing now, if that is told.
    spare: the least room that there was at the last event for what was to be held. lack: the room that was missing
    for what has to wait; infinite where nothing does. transcript: for a script; None where it cannot be repeated.
    rested: nothing had to move in the remainder of it. woken: it took more than expected while it rested.
    """

    number: int
    choice: Choice = field(default_factory=dict)
    again: dict[int, Callable[[], int]] = field(default_factory=dict)
    like: Table | None = None
    names: StepNames = field(default_factory=StepNames)
    recording: Recording = field(default_factory=Recording)
    known: Known | None = None
    variant: Variant = field(default_factory=Variant)
    table: Table | None = None
    planned: tuple[Name, int] | None = None
    returning: deque[int] = field(default_factory=deque)
    sizes: list[int] = field(default_factory=list)
    in_use: set[int] = field(default_factory=set)
    peak: int = 0
    update: int = 0
    allocated: int = 0
    reserved: int = 0
    rise: int = 0
    exact: bool = False
    varies: bool = False
    passing: bool = False
    held: Collection[int] = ()
    undecided: bool = False
    compared: int = COMPARED
    spare: float = inf
    lack: float = inf
    transcript: Transcript | None = field(default_factory=Transcript)
    rested: bool = False
    woken: bool = False
    _settled: bool = False
    _due: Sequence[Action] = ()
    _parted: bool = False
    _level: int | None = None

    def play(self, known: Known, variant: Variant, table: Table) -> None:
        self.known, self.variant, self.table, self.planned = known, variant, table, None
        self._parted = False
        if self._settled:
            self.transcript = None

    @property
    def on_course(self) -> bool:
        """Whether it has a plan, which had all that came so far."""
        return self.table is not None and not self._parted

    def use(self, key: int) -> float:
        """When the plan uses a block from now on: the later, the higher; infinite where it does not."""
        after = () if self.planned is None else self.planned[0]
        return inf if self.table is None else self.table.use(self.names.block(key), after)

    def bring_back(self, keys: Iterable[int]) -> None:
        """The reload of these is due, each before those that are used later."""
        if more := list(keys):
            self.returning = deque(sorted([*self.returning, *more], key=self.use))

    @property
    def longer(self) -> bool:
        """Whether it is longer than any of its kind before, of which less is known than of a shorter one."""
        return self.variant.ratio > 1

    @property
    def deviates(self) -> bool:
        """Whether it is not of the kind that it is taken for."""
        known, recording = self.known, self.recording
        return (
            known is None
            or self._parted
            or (len(known.course), known.uses) != (len(recording.course), recording.uses)
        )

    def hear(self, memory: Memory, own: int) -> None:
        """What was allocated until now. own: the bytes of the step's blocks."""
        self.exact = isinstance(memory, ExactMemory)
        self.held = memory.held if isinstance(memory, ExactMemory) else ()
        for key in self.held:
            self.recording.held(self.names.block(key))
        self.recording.most(memory.peak - own)
        if self._level is not None and memory.peak - self._level > self.rise:
            self.rise = memory.peak - self._level
        self._level = memory.device
        self._count(memory.device, memory.reserved)

    def _count(self, allocated: int, reserved: int) -> None:
        self.allocated = max(self.allocated, allocated)
        self.reserved = max(self.reserved, reserved)

    def write(
        self, event: Event, own: tuple[int, int], memory: Memory | None, room: int, answer: Sequence[Action]
    ) -> Repetition | None:
        """Takes an answer down. What the step goes by from now on, if it is clear now that it repeats another.

        own: the bytes of its blocks before that, and once it is done. room: those of the device that may be taken.
        """
        if self.transcript is None:
            return None
        try:
            if memory is None:
                raise KeyError
            above = memory.device - room
            # Where something had to leave to make room, what was answered depends on each byte.
            between = (above - self.lack + 1, above + self.spare) if self.spare >= 0 else (above, above)
            self.transcript.add(event, memory.device, own, between, answer, self.returning)
        except KeyError:
            self.transcript = None
            return None
        table = self.table
        if self._settled or table is None or len(self.sizes) < min(self.compared, len(table.blocks)):
            return None
        self._settled = True
        if table.script is None or self.exact or not table.script.begins(self.transcript):
            return None
        return Repetition(table.script, self.transcript)

    def repeated(self, repetition: Repetition, recording: Recording) -> None:
        """It has ended, and went to the end by the script of a step that was recorded so."""
        standing = [*self.recording.standing[: repetition.first], *repetition.standing()]
        self.recording = replace(recording, standing=standing)
        self._count(*repetition.most())

    def end_rest(self, rest: Rest) -> None:
        """It has ended, and rested to the end."""
        self.rested = True
        like = rest.recording
        more = self.recording.standing[0] - like.standing[0]
        self.recording = replace(like, standing=[others + more for others in like.standing])
        self._count(rest.allocated, rest.reserved)

    def wake(self) -> None:
        """It is not what it was taken for, and not known enough to be taken for anything else."""
        self.woken = True
        self.known = self.table = self.transcript = None
        self.variant = Variant()

    def as_far_as_loose(self, advice: Sequence[Action]) -> list[Action]:
        """What is advised, but a release of a block that is held only when it is let go.

        A block would else be counted twice: as memory of others, and as one that may leave.
        """
        due = [*self._due, *advice]
        self._due = [each for each in due if type(each) is Release and each.key in self.held]
        return [each for each in due if each not in self._due]

    def take(self, event: Event, others: int | None) -> Name:
        """Records an event, and names it. others: bytes of the device beside the step's blocks."""
        recording, names = self.recording, self.names
        name = names.event(event)
        recording.position(name, others)
        if isinstance(event, Used):
            self.undecided = False
            self.in_use.add(event.key)
            if name[1] is not None:
                recording.use(name[1], event.graph)
            return name
        if isinstance(event, Dropped):
            self.undecided = False
            for key in event.keys:
                if (block := names.block(key)) is not None:
                    recording.drop(block)
            return name
        here = len(recording.course)
        self.undecided = here == 1
        if self.known is not None and not self._parted:
            self.undecided = self._parted = self.known.course[here - 1 : here] != [name]
        if isinstance(event, Saved):
            for key, nbytes in event.blocks:
                block = names.block(key)
                if block is not None and recording.save(block, nbytes):
                    if self.known is not None and self.variant.ratio == 1:
                        self.varies |= self.known.sizes[len(self.sizes) :][:1] != [nbytes]
                    self.sizes.append(nbytes)
                    self.undecided |= len(self.sizes) in (1, self.compared)
        elif isinstance(event, LayerBegin):
            self.in_use.clear()
            recording.turn(event.graph)
            if event.backward:
                recording.backward(name[1], name[2])
        elif isinstance(event, (ForwardBegin, ForwardEnd)):
            recording.turn(event.graph)
            recording.forward(begins=isinstance(event, ForwardBegin))
        return name


class Rest:
    """The part of a step in which the device has so much room that nothing has to move.

    It ends where more than `most` bytes are allocated, or would be with the blocks that were saved since that was
    last told.

    recording: of a step that this one repeats. allocated, reserved: the most of each that was told.
    layer: the most that one takes in its forward; 0 where what layers save has to be blocks.
    """

    def __init__(self, recording: Recording, most: int, memory: Memory, layer: int) -> None:
        self.recording = recording
        self._layer = layer
        self._most = most
        self._device = memory.device
        self.allocated, self.reserved = memory.device, memory.reserved

    def sure_layers(self) -> int:
        """How many that begin now have room, and were each to take twice as much as any did. At least one."""
        return max(1, (self._most - self._device) // (2 * self._layer)) if self._layer else 0

    def goes_on(self, event: Event, memory: Memory | None) -> bool:
        """Whether it does after this event, of which it takes note then."""
        device = self._device if memory is None else memory.device
        if memory is None and isinstance(event, Saved):
            device += sum([nbytes for _, nbytes in event.blocks])
        if device > self._most:
            return False
        self._device = device
        if memory is not None:
            self.allocated = max(self.allocated, device)
            self.reserved = max(self.reserved, memory.reserved)
        return True

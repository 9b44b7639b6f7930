"""One step of training, as a policy follows it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ..base import Dropped, Event, ForwardBegin, ForwardEnd, LayerBegin, Saved, Used
from .names import Name, StepNames
from .recording import Recording
from .repertoire import Known
from .table import Table


@dataclass
class StepUnderWay:
    """A step that goes on, or has ended.

    known, ratio, table: what it is taken for, how long it is, and what it plays; None while nothing suits.
    returning: the keys of blocks whose reload is due. sizes: of the blocks so far. in_use: the blocks that backward
    has used since its last layer began. peak: the most bytes of all that was allocated at a time.
    """

    number: int
    names: StepNames = field(default_factory=StepNames)
    recording: Recording = field(default_factory=Recording)
    known: Known | None = None
    ratio: float = 1.0
    table: Table | None = None
    returning: deque[int] = field(default_factory=deque)
    sizes: list[int] = field(default_factory=list)
    in_use: set[int] = field(default_factory=set)
    peak: int = 0
    _looked: int = 0

    def undecided(self) -> bool:
        """Whether the blocks so far may show what it is: true once for the first, and once when there are eight."""
        seen = len(self.sizes)
        for enough in (8, 1):
            if self._looked < enough <= seen:
                self._looked = enough
                return True
        return False

    @property
    def deviates(self) -> bool:
        """Whether it is not of the kind that it is taken for."""
        return self.known is None or len(self.known.names) != len(self.recording.names)

    def take(self, event: Event, others: int | None) -> Name:
        """Records an event, and names it. others: bytes of the device beside the step's blocks."""
        recording, names = self.recording, self.names
        name = names.event(event)
        recording.position(name, others)
        match event:
            case ForwardBegin(_, num_layers):
                recording.forward(begins=True)
                if recording.layers is None:
                    recording.layers = num_layers
            case ForwardEnd():
                recording.forward(begins=False)
            case LayerBegin(backward=backward):
                self.in_use.clear()
                if backward:
                    recording.backward(name[1], name[2])
            case Saved(_, _, blocks):
                for key, nbytes in blocks:
                    block = names.block(key)
                    if block is not None and block not in recording.blocks:
                        recording.save(block, nbytes)
                        self.sizes.append(nbytes)
            case Used(_, _, key):
                self.in_use.add(key)
                if (block := names.block(key)) is not None:
                    recording.use(block)
            case Dropped(keys):
                for key in keys:
                    if (block := names.block(key)) is not None:
                        recording.drop(block)
        return name

"""A step that goes event by event as one before it did, and is answered as that one was."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

from ..base import Action, Dropped, Event, ForwardBegin, ForwardEnd, LayerBegin, LayerEnd, Memory, Saved, Used

_Sign = tuple[Any, ...]
_Answer = Sequence[tuple[type[Action], int]]


# Room for so much of the limit must be left at an event if nobody asks what is allocated.
_CERTAIN = 1 / 256


class Repetition:
    """The part of a step that has gone by a script so far. That script must begin as the step did.

    memories, events: what was told since then, or was to be expected.
    quiet: the next event has the script's answer, if no more is allocated than when it was written, and there is
    room beyond that.
    """

    def __init__(self, script: Script, begun: Transcript) -> None:
        self.quiet = False
        self._script = script
        self.first = len(begun.lines)
        self.memories: list[Memory] = []
        self.events: list[Event] = []
        self._signs = begun.signs
        self._keys = begun.signs.keys
        self._noted = 0

    def answer(self, event: Event, memory: Memory | None, limit: int) -> Sequence[Action] | None:
        """What the script has for an event; None where it has another one, or memory is not enough.

        memory: None where nobody has asked. limit: the bytes that may be taken on the device.
        """
        lines, number = self._script.lines, self.first + len(self.events)
        try:
            sign, before, _, least, most, answer, _ = lines[number]
            if memory is None:
                last = self.memories[-1]
                device = last.device + before - lines[number - 1].device
                memory = Memory(device, device, last.reserved)
            if self._signs.of(event) != sign or not least <= memory.device - limit <= most:
                return None
        except (IndexError, KeyError):
            return None
        self.memories.append(memory)
        self.events.append(event)
        if number + 1 < len(lines):
            _, after, _, least, most, _, _ = lines[number + 1]
            self.quiet = least == -inf and most - (memory.device + after - before - limit) >= limit * _CERTAIN
        keys = self._keys
        return [action(keys[number]) for action, number in answer] if answer else ()

    def memory_at(self, event: Event) -> Memory | None:
        """What is allocated, as far as is known, at an event that the script has not, if nobody has asked."""
        if not self.memories:
            return None
        last = self.memories[-1]
        device = last.device + (sum(nbytes for _, nbytes in event.blocks) if isinstance(event, Saved) else 0)
        return Memory(device, device, last.reserved)

    @property
    def empty(self) -> bool:
        """Whether it has come to the script's end, and none of its blocks is left."""
        return self._script.ends_empty and self.first + len(self.events) == len(self._script.lines)

    def unnoted(self) -> Iterator[tuple[Memory, Event, int, int]]:
        """What was told since this was last asked, and the step's bytes before and after each answer."""
        lines = self._script.lines[self.first :]
        for i in range(self._noted, len(self.events)):
            self._noted = i + 1
            yield self.memories[i], self.events[i], *lines[i].own

    def standing(self) -> list[int]:
        """The bytes beside blocks at each event."""
        lines = self._script.lines[self.first :]
        return [max(0, memory.device - line.own[0]) for memory, line in zip(self.memories, lines, strict=False)]

    def waiting(self) -> list[int]:
        """The blocks whose reload is due, and has to wait."""
        last = self._script.lines[self.first + len(self.events) - 1]
        return [self._keys[number] for number in last.waiting]

    def transcript(self) -> Transcript:
        """Of the step until now."""
        return Transcript(self._signs, [*self._script.lines[: self.first + len(self.events)]])


class _Line(NamedTuple):
    """An event, and what was answered.

    device: the bytes that were allocated. own: those of the step's blocks on the device, before and after the
    answer. least, most: the answer is the same where so many bytes are taken beyond what may be; as a rule they are
    below 0. answer: actions with the numbers of blocks. waiting: of those whose reload is due, and has to wait.
    """

    sign: _Sign
    device: int
    own: tuple[int, int]
    least: float
    most: float
    answer: _Answer
    waiting: Sequence[int]


@dataclass(frozen=True)
class Script:
    """A step that went as planned. ends_empty: whether none of its blocks was left at its end."""

    lines: Sequence[_Line]
    ends_empty: bool

    def begins(self, begun: Transcript) -> bool:
        """Whether it begins as a step did."""
        pairs = zip(self.lines, begun.lines, strict=False)
        return len(begun.lines) <= len(self.lines) and all(
            (a.sign, a.answer) == (b.sign, b.answer) for a, b in pairs
        )


class _Signs:
    """Knows the events of one step in another one: its graphs and blocks are numbered as they come.

    keys: of the blocks, by number.
    """

    def __init__(self) -> None:
        self.keys: list[int] = []
        self._numbers: dict[int, int] = {}
        self._graphs: dict[int, int] = {}

    def of(self, event: Event) -> _Sign:
        """It is the same for events that mean the same. Raises KeyError for blocks that this step did not save."""
        if isinstance(event, Used):
            return Used, self._numbers[event.key]
        if isinstance(event, Dropped):
            return Dropped, *[self._numbers[key] for key in event.keys]
        if isinstance(event, Saved):
            blocks = [(self._new(key), nbytes) for key, nbytes in event.blocks]
            return Saved, self._graph(event.graph), event.layer, blocks
        if isinstance(event, LayerBegin):
            return LayerBegin, self._graph(event.graph), event.layer, event.backward
        if isinstance(event, LayerEnd):
            return LayerEnd, self._graph(event.graph), event.layer
        if isinstance(event, ForwardBegin):
            return ForwardBegin, self._graph(event.graph), event.num_layers
        if isinstance(event, ForwardEnd):
            return ForwardEnd, self._graph(event.graph)
        raise KeyError(event)

    def number(self, key: int) -> int:
        """Of a block. Raises KeyError as `of`."""
        return self._numbers[key]

    def template(self, answer: Sequence[Action]) -> _Answer:
        """An answer without keys. Raises KeyError as `of`."""
        return [(type(action), self._numbers[action.key]) for action in answer]

    def _graph(self, graph: int) -> int:
        return self._graphs.setdefault(graph, len(self._graphs))

    def _new(self, key: int) -> int:
        number = self._numbers.setdefault(key, len(self.keys))
        if number == len(self.keys):
            self.keys.append(key)
        return number


@dataclass
class Transcript:
    """What was told and answered in a step."""

    signs: _Signs = field(default_factory=_Signs)
    lines: list[_Line] = field(default_factory=list)

    def add(
        self,
        event: Event,
        device: int,
        own: tuple[int, int],
        between: tuple[float, float],
        answer: Sequence[Action],
        waiting: Iterable[int],
    ) -> None:
        """Raises KeyError where blocks of other steps are concerned."""
        signs = self.signs
        self.lines.append(
            _Line(signs.of(event), device, own, *between, signs.template(answer), [*map(signs.number, waiting)])
        )

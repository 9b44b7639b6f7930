"""A step that went as planned, as a script to answer the next one by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from ..actions import Action
from ..base import Dropped, Event, ForwardBegin, ForwardEnd, LayerBegin, LayerEnd, Memory, Saved, Used

_Sign = tuple[Any, ...]
_Answer = Sequence[tuple[type[Action], int]]


# Room for so much of the limit must be left at an event if nobody asks what is allocated.
_CERTAIN = 1 / 256


class Repetition:
    """The part of a step that has gone by a script so far. That script must begin as the step did.

    quiet: the next event has the script's answer, if no more is allocated than when it was written, and there is
    room beyond that. together: what comes next that may be told as one event; None where each is to be told.
    """

    def __init__(self, script: Script, begun: Transcript) -> None:
        self.quiet = False
        self.together: Together | None = None
        self._script = script
        self.first = len(begun.lines)
        self._devices: list[int] = []  # the bytes that were allocated at each event, or were to be expected
        self._told: dict[int, Memory] = {}  # at those of which somebody has asked
        self._events: list[Event | None] = []  # None for one of several that were told together
        self._limit = 0
        self._signs = begun.signs
        self._noted = 0

    def apart(self, event: Event) -> Sequence[Event]:
        """The events of the script that are told as this one, with the uses before them."""
        if isinstance(event, Saved) and len(event.blocks) > 1:
            return [Saved(event.graph, event.layer, (block,)) for block in event.blocks]
        if not isinstance(event, Dropped) or self.together is None:
            return (event,)
        found: list[Event] = []
        keys = list(event.keys)
        for place in range(self.first + len(self._events), self.together.end):
            sign = self._script.lines[place].sign
            if not keys or sign[0] is Saved:
                break
            if sign[0] is Used:
                found.append(self._signs.event(sign))
            else:
                found.append(Dropped(keys[: len(sign) - 1]))
                del keys[: len(sign) - 1]
        return [*found, Dropped(keys)] if keys else found

    def answer(self, event: Event, memory: Memory | None, limit: int) -> Sequence[Action] | None:
        """What the script has for an event; None where it has another one, or memory is not enough.

        memory: None where nobody has asked. limit: the bytes that may be taken on the device.
        """
        lines, number = self._script.lines, self.first + len(self._events)
        try:
            sign, before, _, least, most, _, _ = lines[number]
            device = self._devices[-1] + before - lines[number - 1].device if memory is None else memory.device
            if self._signs.of(event) != sign or not least <= device - limit <= most:
                return None
        except (IndexError, KeyError):
            return None
        if memory is not None:
            self._told[len(self._events)] = memory
        self._devices.append(device)
        self._events.append(event)
        return self._answer(lines[number], limit)

    def answer_together(self, event: Saved | Dropped, limit: int) -> Sequence[Action] | None:
        """What the script has for all that was told as one event. None where it has to be looked at one by one."""
        run, first = self.together, self.first + len(self._events)
        if run is None or limit != self._limit:
            return None
        lines, end = self._script.lines, first
        try:
            if isinstance(event, Saved):
                end += len(event.blocks)
                for block, line in zip(event.blocks, lines[first:end], strict=True):
                    if self._signs.of(Saved(event.graph, event.layer, (block,))) != line.sign:
                        return None
            else:
                numbers = [*map(self._signs.number, event.keys)]
                while numbers:
                    kind, *others = lines[end].sign
                    if kind is Dropped and others == numbers[: len(others)]:
                        del numbers[: len(others)]
                    elif kind is not Used:
                        return None
                    end += 1
        except (IndexError, KeyError, ValueError):
            return None
        if end > run.end:
            return None
        above = self._devices[-1] - lines[first - 1].device
        self._devices += [line.device + above for line in lines[first:end]]
        self._events += [None] * (end - first)
        return self._answer(lines[end - 1], limit)

    def _answer(self, line: _Line, limit: int) -> Sequence[Action]:
        """What the script has for the event that came last."""
        number = self.first + len(self._events)
        self.quiet, self.together, self._limit = False, None, limit
        if number < len(self._script.lines):
            following, run = self._script.lines[number], self._script.runs[number - 1]
            above, sure = self._devices[-1] - line.device - limit, limit * _CERTAIN
            self.quiet = following.most - following.device >= above + sure
            if run is not None and run.least <= above <= run.most - sure:
                self.together = run
        return [action(self._signs.keys[block]) for action, block in line.answer] if line.answer else ()

    def memory_at(self, events: Iterable[Event]) -> Memory | None:
        """What is allocated, as far as is known, at events that the script has not, if nobody has asked."""
        if not self._devices:
            return None
        saved = [nbytes for event in events if isinstance(event, Saved) for _, nbytes in event.blocks]
        device = self._devices[-1] + sum(saved)
        return Memory(device, device)

    def most(self) -> tuple[int, int]:
        """The most bytes that were allocated at an event, and with what lay between tensors, if that is known."""
        return max(self._devices, default=0), max((each.reserved for each in self._told.values()), default=0)

    @property
    def empty(self) -> bool:
        """Whether it has come to the script's end, and none of its blocks is left."""
        return self._script.ends_empty and self.first + len(self._events) == len(self._script.lines)

    def unnoted(self) -> Iterator[tuple[Memory, Event, int, int]]:
        """What was told since this was last asked, and the step's bytes before and after each answer."""
        lines = self._script.lines[self.first :]
        for i in range(self._noted, len(self._events)):
            self._noted = i + 1
            event = self._events[i] or self._signs.event(lines[i].sign)
            yield self._told.get(i) or Memory(self._devices[i], self._devices[i]), event, *lines[i].own

    def standing(self) -> list[int]:
        """The bytes beside blocks at each event."""
        lines = self._script.lines[self.first :]
        return [max(0, device - line.own[0]) for device, line in zip(self._devices, lines, strict=False)]

    def waiting(self) -> list[int]:
        """The blocks whose reload is due, and has to wait."""
        last = self._script.lines[self.first + len(self._events) - 1]
        return [self._signs.keys[number] for number in last.waiting]

    def transcript(self) -> Transcript:
        """Of the step until now."""
        return Transcript(self._signs, [*self._script.lines[: self.first + len(self._events)]])


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


class Together(NamedTuple):
    """Lines of a script that are told together, as only the last has an answer, if any.

    They are saves of one layer; or drops, the last of them is one, and the uses before these, which nobody has to
    tell.

    end: the place of the line after them. nbytes: of the blocks that they save or drop. least, most: they hold
    where as much more than the script has is allocated, beyond what may be taken. uses: they are drops.
    """

    end: int
    nbytes: int
    least: float
    most: float
    uses: bool


@dataclass(frozen=True)
class Script:
    """A step that went as planned. ends_empty: whether none of its blocks was left at its end."""

    lines: Sequence[_Line]
    ends_empty: bool

    @cached_property
    def runs(self) -> Sequence[Together | None]:
        """Of each line the run that follows it, if there is one."""
        sizes: dict[int, int] = {}
        for line in self.lines:
            if line.sign[0] is Saved:
                sizes.update(line.sign[3])
        found: list[Together | None] = [None]
        for place in reversed(range(1, len(self.lines))):
            found.append(self._run(place, found[-1], sizes))
        return found[::-1]

    def _run(self, place: int, following: Together | None, sizes: Mapping[int, int]) -> Together | None:
        """The run that begins with a line. following: the one that begins with the next."""
        line = self.lines[place]
        kind, *what = line.sign
        if kind not in (Saved, Used, Dropped) or (kind is Saved and len(what[2]) != 1):
            return None
        if following is not None and following.uses != (kind is not Saved):
            following = None
        if following is not None and kind is Saved and self.lines[place + 1].sign[:3] != line.sign[:3]:
            following = None
        blocks = () if kind is Used else what if kind is Dropped else [number for number, _ in what[2]]
        nbytes = sum([sizes[number] for number in blocks])
        least, most = line.least - line.device, line.most - line.device
        if following is not None and not line.answer:
            least, most = max(least, following.least), min(most, following.most)
            return Together(following.end, nbytes + following.nbytes, least, most, following.uses)
        return None if kind is Used else Together(place + 1, nbytes, least, most, kind is Dropped)

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
        self._savers: dict[int, tuple[int, int]] = {}
        self._numbers: dict[int, int] = {}
        self._graphs: dict[int, int] = {}

    def of(self, event: Event) -> _Sign:
        """It is the same for events that mean the same. Raises KeyError for blocks that this step did not save."""
        if isinstance(event, Used):
            return Used, self._numbers[event.key]
        if isinstance(event, Dropped):
            return Dropped, *[self._numbers[key] for key in event.keys]
        if isinstance(event, Saved):
            blocks = [(self._new(key, (event.graph, event.layer)), nbytes) for key, nbytes in event.blocks]
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

    def event(self, sign: _Sign) -> Event:
        """The save of one block, the use of one, or a drop."""
        kind, *what = sign
        if kind is Dropped:
            return Dropped([self.keys[number] for number in what])
        number, nbytes = (what[0], 0) if kind is Used else what[2][0]
        key, saver = self.keys[number], self._savers[number]
        return Used(*saver, key) if kind is Used else Saved(*saver, [(key, nbytes)])

    def number(self, key: int) -> int:
        """Of a block. Raises KeyError as `of`."""
        return self._numbers[key]

    def template(self, answer: Sequence[Action]) -> _Answer:
        """An answer without keys. Raises KeyError as `of`."""
        return [(type(action), self._numbers[action.key]) for action in answer]

    def _graph(self, graph: int) -> int:
        return self._graphs.setdefault(graph, len(self._graphs))

    def _new(self, key: int, saver: tuple[int, int]) -> int:
        number = self._numbers.setdefault(key, len(self.keys))
        if number == len(self.keys):
            self.keys.append(key)
        self._savers[number] = saver
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

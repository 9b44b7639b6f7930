"""What a policy hears of a step, as a profile to plan for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..base import Dropped, Event, ForwardBegin, ForwardEnd, LayerBegin, LayerEnd, Saved, Used
from .profile import Profile


@dataclass
class Recording:
    """One step, as its events come.

    names: of the positions so far. course: of these, all but the uses and drops of blocks, whose order may change.
    uses: how many uses there were. blocks: their lives, in the order of their saves. standing: the bytes beside
    them at each position. split: backward came back to layers for blocks that it had used there before, as with
    retain_graph=True.

    The device turns from one graph to another, or to a backward over the same layers once more. A block that is not
    needed before a later turn can leave as soon as the next layer begins, as it can before its first use.
    """

    names: list[Name] = field(default_factory=list)
    course: list[Name] = field(default_factory=list)
    uses: int = 0
    blocks: dict[Name, _Life] = field(default_factory=dict)
    standing: list[int] = field(default_factory=list)
    split: bool = False
    _unmovable: list[int] = field(default_factory=list)
    _running: int = 0
    _backward: int = 0
    _measured: bool = True
    # The graph at work, and where each turn began. Of each graph the layer whose backward began last, and all that
    # have begun.
    _graph: int | None = None
    _turns: list[int] = field(default_factory=lambda: [0])
    _begun: dict[int, int] = field(default_factory=dict)
    _past: set[tuple[int, int]] = field(default_factory=set)

    def position(self, name: Name, others: int | None) -> None:
        """An event comes. others: the bytes of device memory that are no blocks of the step; None if not known."""
        self.names.append(name)
        if name[0] == "used":
            self.uses += 1
        elif name[0] != "dropped":
            self.course.append(name)
        if others is None:
            self._measured = False
            others = 0
        elif others < 0:
            others = 0
        self._unmovable.append(others)
        self.standing.append(others)

    def most(self, others: int) -> None:
        """At most so much was allocated beside the blocks since the last event."""
        if self._unmovable and others > self._unmovable[-1]:
            self._unmovable[-1] = others

    def held(self, block: Name | None) -> None:
        """Somebody beside backward has the block when the next event comes."""
        if block is not None and (life := self.blocks.get(block)) is not None:
            (life.runs[-1] if life.runs else life).loose = len(self.names) + 1

    def take_over(self, count: int, names: Sequence[Name], like: Profile) -> list[float]:
        """The seconds of the first positions, and at least its memory, from a step that has these names."""
        place = {name: k for k, name in enumerate(names)}
        seconds = []
        for i, name in enumerate(self.names[:count]):
            k = place.get(name)
            seconds.append(0.0 if k is None else like.seconds[k])
            if k is not None:
                self._unmovable[i] = max(self._unmovable[i], like.unmovable[k])
        return seconds

    def forward(self, begins: bool) -> None:
        """A forward begins or ends at the last position."""
        self._running += 1 if begins else -1

    def turn(self, graph: int) -> None:
        """What happens at the last position is of this graph."""
        if graph != self._graph:
            self._graph = graph
            self._turns.append(len(self.names) - 1)

    def backward(self, graph: int, layer: int) -> None:
        """A layer's backward begins at the last position."""
        self._backward = len(self.names) - 1
        if self._begun.get(graph) != layer and (graph, layer) in self._past:
            self._turns.append(self._backward)
        self._begun[graph] = layer
        self._past.add((graph, layer))

    def save(self, block: Name, nbytes: int) -> bool:
        """Whether it is saved for the first time."""
        life = self.blocks.setdefault(block, new := _Life(nbytes, len(self.names) - 1))
        life.shared |= life is not new
        return life is new

    def use(self, block: Name, graph: int) -> None:
        """graph: the one that saved it last."""
        life = self.blocks.get(block)
        if life is None:
            return
        if not life.shared:
            self.turn(graph)
        here = len(self.names) - 1
        if not life.runs or self._turns[-1] > life.runs[-1].last:
            # What one operator alone has saved is used again only where backward comes to that once more.
            self.split |= bool(life.runs) and not life.shared
            life.runs.append(_Run(here, self._backward))
        life.runs[-1].last = here

    def drop(self, block: Name) -> None:
        life = self.blocks.get(block)
        if life is not None:
            life.dropped = len(self.names) - 1

    @property
    def regular(self) -> bool:
        """Whether a plan can be made from it.

        Its forwards ended, and backward used most of what they saved, which was dropped then.
        """
        used = sum(each.nbytes for each in self.blocks.values() if each.runs and each.dropped)
        total = sum(each.nbytes for each in self.blocks.values())
        return self._measured and not self._running and 0 < total <= 2 * used

    def profile(self, seconds: Sequence[float]) -> tuple[Profile, list[Name]]:
        """The step, and the names of its blocks.

        A block that can leave after a use has one more life from there on, which is a block of its own to a plan:
        its name is the block's with a number behind it.

        Raises ValueError where there are not as many seconds as positions.
        """
        begins = [k for k, name in enumerate(self.names) if name[0] in ("forward", "backward")]
        lives = [life for name, block in self.blocks.items() for life in self._lives(name, block, begins)]
        lives.sort(key=lambda life: life[1])
        columns = [list(column) for column in zip(*lives, strict=True)] or [[] for _ in range(7)]
        nbytes, saved, used, dropped, backward, loose, names = columns
        fates = nbytes, saved, used, dropped, backward
        return Profile(list(seconds), self._unmovable, *fates, self.standing, loose, earlier_lives(names)), names

    def _lives(
        self, name: Name, block: _Life, begins: Sequence[int]
    ) -> Iterator[tuple[int, int, int, int, int, int, Name]]:
        """Of each of a block's lives what a `Profile` has of it, and its name. begins: positions of layers."""
        end = len(self.names) if block.dropped is None else block.dropped
        saved, loose = block.saved, block.loose
        for number, run in enumerate((*block.runs, None)):
            if saved >= end:
                return
            used = backward = last = end
            if run is not None:
                used, backward = min(run.first, end), run.backward
                if (turn := _next(self._turns, run.last, end)) < end:
                    last = _next(begins, run.last, turn)
            own = (*name, number) if number else name
            yield block.nbytes, saved, used, last, backward, max(loose, saved + 1), own
            if run is not None:
                saved, loose = last, run.loose


def _next(places: Sequence[int], after: int, end: int) -> int:
    """The first of the places after one, or the end where that comes before."""
    k = bisect_right(places, after)
    return min(places[k], end) if k < len(places) else end


@dataclass
class _Run:
    """Uses of a block in one turn: the first and the last, and where the first one's layer began its backward.

    loose: as a `_Life` has it, after them.
    """

    first: int
    backward: int
    last: int = 0
    loose: int = 0


@dataclass
class _Life:
    """shared: it was saved more than once."""

    nbytes: int
    saved: int
    dropped: int | None = None
    loose: int = 0
    shared: bool = False
    runs: list[_Run] = field(default_factory=list)


Name = tuple[Any, ...]


def whole(life: Name) -> Name:
    """The name of a block, by that of one of its lives."""
    return life[:3]


def earlier_lives(lives: Sequence[Name]) -> list[int]:
    """Of each life the place of the one before it of the same block; -1 for none. Empty where no block has two."""
    places = {life: place for place, life in enumerate(lives)}
    earlier = [-1 if life == whole(life) else places.get(_before(life), -1) for life in lives]
    return earlier if max(earlier, default=-1) >= 0 else []


def _before(life: Name) -> Name:
    """The name of a block's life before one that is not its first."""
    number = life[3] - 1
    return (*whole(life), number) if number else whole(life)


class StepNames:
    """Names the events of one step: what happens to which graph of the step and which layer, and how often before.

    A block is named by the graph and the layer that saved it first, and its number among theirs.
    """

    def __init__(self) -> None:
        self._graphs: dict[int, int] = {}
        self._seen: dict[Name, int] = {}
        self._blocks: dict[int, Name] = {}
        self._keys: dict[Name, int] = {}

    def event(self, event: Event) -> Name:
        """The name of an event. Blocks that it saves are named with it."""
        name: Name
        if isinstance(event, Used):
            name = "used", self._blocks.get(event.key)
        elif isinstance(event, Dropped):
            name = "dropped", self._blocks.get(event.keys[0]) if event.keys else None
        elif isinstance(event, Saved):
            graph, layer = self._graph(event.graph), event.layer
            for key, _ in event.blocks:
                if key not in self._blocks:
                    self._blocks[key] = block = graph, layer, self._count(("block", graph, layer))
                    self._keys[block] = key
            name = "saved", graph, layer
        elif isinstance(event, LayerBegin):
            name = "backward" if event.backward else "forward", self._graph(event.graph), event.layer
        elif isinstance(event, LayerEnd):
            name = "end", self._graph(event.graph), event.layer
        elif isinstance(event, ForwardBegin):
            name = "begin", self._graph(event.graph), event.num_layers
        elif isinstance(event, ForwardEnd):
            name = "over", self._graph(event.graph)
        else:
            name = (type(event).__name__,)
        return *name, self._count(name)

    def block(self, key: int) -> Name | None:
        """The name of a block; None where this step did not save it."""
        return self._blocks.get(key)

    def key(self, block: Name) -> int | None:
        """Of a block, or of one of its lives."""
        return self._keys.get(whole(block))

    def _graph(self, graph: int) -> int:
        return self._graphs.setdefault(graph, len(self._graphs))

    def _count(self, name: Name) -> int:
        seen = self._seen.get(name, 0)
        self._seen[name] = seen + 1
        return seen


def spoken(name: Name) -> str:
    """An event's name as people say it, such as "the backward of layer 3 of graph 0"."""
    match name:
        case "used" | "dropped" as kind, (graph, layer, number), _:
            what = f"the {'use' if kind == 'used' else 'end'} of block {number} of layer {layer} of graph {graph}"
        case "saved", graph, layer, _:
            what = f"a save of layer {layer} of graph {graph}"
        case "backward" | "forward" as kind, graph, layer, _:
            what = f"the {kind} of layer {layer} of graph {graph}"
        case "end", graph, layer, _:
            what = f"the end of layer {layer} of graph {graph}"
        case "begin" | "over" as kind, graph, *_:
            what = f"the {'beginning' if kind == 'begin' else 'end'} of the forward of graph {graph}"
        case _:
            what = f"a {name[0]}"
    return what

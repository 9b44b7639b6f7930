"""What a policy hears of a step, as a profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .names import Name
from .profile import Profile


@dataclass
class _Life:
    nbytes: int
    saved: int
    used: int | None = None
    dropped: int | None = None
    backward: int = 0
    loose: int = 0
    again: bool = False


@dataclass
class Recording:
    """One step, as its events come.

    names: of the positions so far. course: of these, all but the uses and drops of blocks, whose order may change.
    uses: how many uses there were. blocks: their lives, in the order of their saves. standing: the bytes beside
    them at each position.
    """

    names: list[Name] = field(default_factory=list)
    course: list[Name] = field(default_factory=list)
    uses: int = 0
    blocks: dict[Name, _Life] = field(default_factory=dict)
    standing: list[int] = field(default_factory=list)
    _unmovable: list[int] = field(default_factory=list)
    _running: int = 0
    _backward: int = 0
    _measured: bool = True
    # Of each graph the layer whose backward began last; all that have begun; and whether the last did so once more.
    _begun: dict[int, int] = field(default_factory=dict)
    _past: set[tuple[int, int]] = field(default_factory=set)
    _returned: bool = False

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
            life.loose = len(self.names) + 1

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

    def backward(self, graph: int, layer: int) -> None:
        """A layer's backward begins at the last position."""
        self._backward = len(self.names) - 1
        if self._begun.get(graph) != layer:
            self._returned = (graph, layer) in self._past
        self._begun[graph] = layer
        self._past.add((graph, layer))

    def save(self, block: Name, nbytes: int) -> None:
        self.blocks.setdefault(block, _Life(nbytes, len(self.names) - 1))

    def use(self, block: Name) -> None:
        life = self.blocks.get(block)
        if life is None:
            return
        if life.used is None:
            life.used, life.backward = len(self.names) - 1, self._backward
        elif self._returned:
            life.again = True

    def drop(self, block: Name) -> None:
        life = self.blocks.get(block)
        if life is not None:
            life.dropped = len(self.names) - 1

    @property
    def twice(self) -> bool:
        """Whether backward came a second time to blocks that it had used before."""
        again = sum(each.nbytes for each in self.blocks.values() if each.again)
        return again > sum(each.nbytes for each in self.blocks.values()) // 8

    @property
    def regular(self) -> bool:
        """Whether a plan can be made from it.

        Its forwards ended, and one backward, and no second over the same blocks, used most of what they saved,
        which was dropped then. A backward may come back to a layer, but there it uses other blocks.
        """
        used = sum(each.nbytes for each in self.blocks.values() if each.used is not None and each.dropped)
        total = sum(each.nbytes for each in self.blocks.values())
        return self._measured and not self._running and 0 < total <= 2 * used and not self.twice

    def profile(self, seconds: Sequence[float]) -> Profile:
        """Raises ValueError where there are not as many seconds as positions."""
        end = len(self.names)
        nbytes, saved, used, dropped, backward, loose = [], [], [], [], [], []
        for life in self.blocks.values():
            last = end if life.dropped is None else life.dropped
            nbytes.append(life.nbytes)
            saved.append(life.saved)
            used.append(last if life.used is None else min(life.used, last))
            dropped.append(last)
            backward.append(last if life.used is None else life.backward)
            loose.append(max(life.loose, life.saved + 1))
        lives = (nbytes, saved, used, dropped, backward)
        return Profile(list(seconds), self._unmovable, *lives, self.standing, loose)

"""What a plan answers at each event of a step."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from math import inf

from ..actions import Action, Fetch, Offload, Release, Reload, Retain, Spill
from .profile import DiskPlan, Plan, Profile
from .recording import Name, Recording, StepNames, whole
from .script import Script

_Step = tuple[type[Action], Name]


@dataclass(eq=False)
class Table:
    """What to answer at each event of a step, by the events' names.

    blocks: the names of their lives, which are numbered as in the profile. returns: of the lives in which they
    leave, in the order in which they come back. script, recording: of a step that was played by it.
    """

    profile: Profile
    plan: Plan
    disk: DiskPlan | None
    names: Sequence[Name]
    blocks: Sequence[Name]
    returns: Sequence[Name] = field(init=False)
    script: Script | None = field(default=None, init=False)
    recording: Recording | None = field(default=None, init=False)
    _place: dict[int, int] = field(init=False)
    _lives: dict[Name | None, list[int]] = field(init=False)
    # The bytes of the step's blocks and of all at each position, and of all from each block's reload to its use at
    # most.
    _own: Sequence[int] = field(init=False)
    _memory: Sequence[int] = field(init=False)
    _highest: Sequence[int] = field(init=False)
    _reload: Mapping[int, int] = field(init=False)
    _steps: dict[Name, list[_Step]] = field(init=False)
    _position: dict[Name, int] = field(init=False)

    def __post_init__(self) -> None:
        steps: defaultdict[Name, list[_Step]] = defaultdict(list)
        profile, plan = self.profile, self.plan
        offload = {**dict(enumerate(profile.saved)), **plan.early} if self.disk is None else self.disk.offload
        reload = plan.reload if self.disk is None else self.disk.reload
        in_order = sorted(reload, key=lambda b: (reload[b], profile.used[b]))
        again = {earlier for b, earlier in enumerate(profile.earlier) if b in plan.release}
        for b in sorted(plan.release):
            steps[self.names[offload[b]]].append((Offload, self.blocks[b]))
        if self.disk is not None:
            for b in sorted(self.disk.spill):
                steps[self.names[offload[b]]].append((Spill, self.blocks[b]))
        for b in sorted(plan.release, key=plan.release.__getitem__):
            steps[self.names[plan.release[b]]].append((Release, self.blocks[b]))
            if b in again:
                steps[self.names[plan.release[b]]].append((Retain, self.blocks[b]))
        if self.disk is not None:
            for b, k in sorted(self.disk.fetch.items(), key=lambda item: reload[item[0]]):
                steps[self.names[k]].append((Fetch, self.blocks[b]))
        for b in in_order:
            if reload[b] < profile.dropped[b]:
                steps[self.names[reload[b]]].append((Reload, self.blocks[b]))
        change = [0] * (len(profile.seconds) + 1)
        for b, nbytes in enumerate(profile.nbytes):
            change[profile.saved[b]] += nbytes
            change[profile.dropped[b]] -= nbytes
            if b in plan.release:
                change[plan.release[b]] -= nbytes
                change[reload[b]] += nbytes
        own = list(accumulate(change))
        self._own, self._memory = own, [*map(int.__add__, own, profile.unmovable), 0]
        last = accumulate((profile.used[b] for b in in_order), max)
        windows = zip((reload[b] for b in in_order), last, strict=True)
        self._highest = _maxima(self._memory, windows)
        self._reload = reload
        self.returns = [self.blocks[b] for b in in_order]
        self._place = {b: i for i, b in enumerate(in_order)}
        self._lives = defaultdict(list)
        for b, block in enumerate(self.blocks):
            self._lives[whole(block)].append(b)
        self._steps = dict(steps)
        self._position = {name: k for k, name in enumerate(self.names)}

    @cached_property
    def layer_bytes(self) -> int:
        """The most by which memory rises from a layer's forward to what comes after it. At least 1."""
        begins = [k for k, name in enumerate(self.names) if name[0] in ("forward", "over")]
        return max([1, *(self._memory[then] - self._memory[k] for k, then in pairwise(begins))])

    def actions(self, event: Name, names: StepNames) -> list[Action]:
        """The actions at an event, about the blocks of this step that are alive or were."""
        steps = self._steps.get(event, ())
        return [kind(key) for kind, block in steps if (key := names.key(block)) is not None]

    def use(self, block: Name | None, after: Name) -> float:
        """The position of a block's next use after an event; infinite where the plan has none.

        Of uses beyond the first of a life it knows only that they come before its end: it may be at once.
        """
        now = self._position.get(after, 0)
        for b in self._lives.get(block, ()):
            use, end = max(self.profile.used[b], now), self.profile.dropped[b]
            if use < end:
                return use
        return inf

    def _life(self, block: Name | None, now: int) -> int | None:
        """The life that a block is in at a position."""
        lives = self._lives.get(block, ())
        return next((b for b in lives if now < self.profile.dropped[b]), lives[-1] if lives else None)

    def following(self, block: Name | None, after: Name, count: int) -> Sequence[Name]:
        """The next to come back after a block that comes back after an event."""
        b = self._life(block, self._position.get(after, 0))
        first = len(self.returns) if b is None else self._place.get(b, len(self.returns)) + 1
        return self.returns[first : first + count]

    def knows(self, event: Name) -> bool:
        """Whether an event is one of the plan's."""
        return event in self._position

    def beside(self, event: Name, others: int) -> int:
        """The bytes beside blocks until the next event, where there are `others` now.

        It is as much more than in the plan as it is now; for an event without a plan it stays as it is.
        """
        k = self._position.get(event)
        return others if k is None else max(others, self.profile.unmovable[k] + self._more(k, others))

    def needed(self, event: Name, others: int, block: Name | None, own: int) -> int:
        """The most bytes of the device until the use of a block, if its reload is due and begins now.

        own: the bytes of the step's blocks on the device, with this one; others: all else, at the event.
        """
        k = self._position.get(event)
        b = None if k is None else self._life(block, k)
        if k is None or b is None:
            return own + others
        # What is later than planned, or was not to leave, must only fit from here on.
        on_time = b in self._reload and k <= self._reload[b]
        until = self.profile.used[b] + 1
        highest = self._highest[self._place[b]] if on_time else max(self._memory[k:until], default=0)
        return max(own + others, highest + own - self._own[k] + self._more(k, others))

    def _more(self, k: int, others: int) -> int:
        return others - (self.profile.standing[k] if self.profile.standing else 0)


def _maxima(values: Sequence[int], windows: Iterable[tuple[int, int]]) -> list[int]:
    """The highest value from the first place to the second of each window. Both places never fall."""
    found = []
    highest: deque[int] = deque()  # places of falling values
    seen = 0
    for first, last in windows:
        for place in range(max(seen, first), last + 1):
            while highest and values[highest[-1]] <= values[place]:
                highest.pop()
            highest.append(place)
        seen = max(seen, last + 1)
        while highest[0] < first:
            highest.popleft()
        found.append(values[highest[0]])
    return found

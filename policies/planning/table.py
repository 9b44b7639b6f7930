"""A plan as answers to events."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from ..base import Action, Fetch, Offload, Release, Reload, Spill
from .names import Name, StepNames
from .plan import DiskPlan, Plan
from .profile import Profile
from .recording import Recording
from .script import Script

Step = tuple[type[Action], Name]


@dataclass(eq=False)
class Table:
    """What to answer at each event of a step, by the events' names.

    returns: the blocks that leave, in the order in which they come back. script,
    recording: of a step that was played by it.
    """

    profile: Profile
    plan: Plan
    disk: DiskPlan | None
    names: Sequence[Name]
    blocks: Sequence[Name]
    returns: Sequence[Name] = field(init=False)
    script: Script | None = field(default=None, init=False)
    recording: Recording | None = field(default=None, init=False)
    _place: dict[Name, int] = field(init=False)
    # The bytes of the step's blocks at each position, and of all from each block's reload to its use at most.
    _own: Sequence[int] = field(init=False)
    _highest: Sequence[int] = field(init=False)
    _steps: dict[Name, list[Step]] = field(init=False)
    _position: dict[Name, int] = field(init=False)

    def __post_init__(self) -> None:
        steps: defaultdict[Name, list[Step]] = defaultdict(list)
        profile, plan = self.profile, self.plan
        offload = profile.saved if self.disk is None else self.disk.offload
        reload = plan.reload if self.disk is None else self.disk.reload
        in_order = sorted(reload, key=lambda b: (reload[b], profile.used[b]))
        for b in sorted(plan.release):
            steps[self.names[offload[b]]].append((Offload, self.blocks[b]))
        if self.disk is not None:
            for b in sorted(self.disk.spill):
                steps[self.names[offload[b]]].append((Spill, self.blocks[b]))
        for b in sorted(plan.release, key=plan.release.__getitem__):
            steps[self.names[plan.release[b]]].append((Release, self.blocks[b]))
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
        memory = [*map(int.__add__, own, profile.unmovable), 0]
        last = accumulate((profile.used[b] for b in in_order), max)
        windows = zip((reload[b] for b in in_order), last, strict=True)
        self._own = own
        self._highest = _maxima(memory, windows)
        self.returns = [self.blocks[b] for b in in_order]
        self._place = {block: i for i, block in enumerate(self.returns)}
        self._steps = dict(steps)
        self._position = {name: k for k, name in enumerate(self.names)}

    def actions(self, event: Name, names: StepNames) -> list[Action]:
        """The actions at an event, about the blocks of this step that are alive or were."""
        steps = self._steps.get(event, ())
        return [kind(key) for kind, block in steps if (key := names.key(block)) is not None]

    def place(self, block: Name | None) -> int:
        """Where it stands among `returns`; what does not leave by the plan comes last."""
        return len(self.returns) if block is None else self._place.get(block, len(self.returns))

    def following(self, block: Name | None, count: int) -> Sequence[Name]:
        """The next to come back after a block."""
        first = self.place(block) + 1
        return self.returns[first : first + count]

    def beside(self, event: Name, others: int) -> int:
        """The bytes beside blocks until the next event, where there are `others` now.

        It is as much more than in the plan as it is now; for an event without a plan it stays as it is.
        """
        k = self._position.get(event)
        return others if k is None else max(others, self.profile.unmovable[k] + self._more(k, others))

    def needed(self, event: Name, block: Name | None, own: int, others: int) -> int:
        """The most bytes of the device until the use of a block, if its reload is due and begins now.

        own: the bytes of the step's blocks on the device, with this one; others: all else.
        """
        k = self._position.get(event)
        place = self.place(block)
        if k is None or place == len(self.returns):
            return own + others
        return max(own + others, self._highest[place] + own - self._own[k] + self._more(k, others))

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

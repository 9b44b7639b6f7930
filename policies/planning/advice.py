"""What a plan means for people: where it waits, and what would help."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from ...sizes import format_bytes, format_seconds
from .choosing import choose
from .disk_and_states import Beside, StatesShare, explained, states_to_keep
from .planner import least_memory, plan
from .profile import BudgetTooSmall, Cause, DiskPlan, Link, Plan, PlannedStall, Profile
from .recording import Name
from .stitching import Choice, Ways
from .treated import treatable

# Of the step's compute time: so much waiting is none.
_NONE = 0.005
# Of the budget: what is less is not worth a line.
_LITTLE = 0.05
_MOST = 3
# What a profile has of each block that a checkpoint leaves as it is.
_KEPT = ("nbytes", "saved", "dropped", "backward", "loose")

# The seconds that a step is shorter with it, and the sentence.
_Found = tuple[float, str]


class _There(NamedTuple):
    """A step within another budget: its seconds, with those of optimizer states on the link, and its waits."""

    seconds: float
    waits: float
    choice: Choice


@dataclass(frozen=True)
class Adviser:
    """Advises on one step within a budget.

    names, blocks: of the step's positions and blocks. budget: for all, with optimizer states. grown: bytes that
    have come to stay on the device since the first step began. disk: the plan for the drive, if there is one.
    states: of optimizers, which a plan has stay on the device or not.
    recompute: layers may be computed again. choice: which are. ways: the step with all of them treated in one way,
    where that is known.
    """

    profile: Profile
    names: Sequence[Name]
    blocks: Sequence[Name]
    budget: int
    link: Link
    grown: int = 0
    disk: DiskPlan | None = None
    states: StatesShare = field(default_factory=StatesShare)
    recompute: bool = True
    ways: Ways | None = None
    choice: Choice = field(default_factory=dict)

    def advice(self) -> tuple[str, ...]:
        """At most three sentences, what helps the most first. It takes about twenty plans."""
        try:
            now = plan(self.profile, self.budget - self.states.kept, self._now.link)
        except BudgetTooSmall as error:
            why = str(explained(error, self.profile, self.names, self.states))
            again = 'TieringManager(recompute="auto") computes layers again in place of what finds no room'
            return (why, again) if error.without_room and not self.recompute else (why,)
        found = [self._drive()]
        waits = now.waits > _NONE * self.profile.compute
        if waits:
            found += [None if self.recompute else self._again(now), self._optimizer(now)]
        else:
            found.append(self._smaller(now))
        if waits or self.choice:
            found.append(self._larger(now))
        told = sorted((each for each in found if each is not None), reverse=True)
        return tuple(text for _, text in told[:_MOST])

    def _larger(self, now: Plan) -> _Found | None:
        """A budget is advised as it was tried: with as many states on the device as would stay there then."""
        steps = [self.profile]
        if self.ways is not None and self.choice:
            steps.append(self.ways.steps[None].profile)
        for least in sorted({self._least(step) for step in steps}):
            if least <= self.budget:
                continue
            there = self._within(least)
            saved = now.seconds + self._now.seconds - there.seconds
            if saved > _NONE * now.seconds:
                hides = "hide all copies, and " if there.waits <= _NONE * now.seconds < now.waits else ""
                told = f"a budget of {format_bytes(least)} would {hides}save {format_seconds(saved)}"
                return saved, told + (": all layers keep all then" if self.choice and not there.choice else "")
        return None

    def _smaller(self, now: Plan) -> _Found | None:
        least = max(self._least(self.profile), self.states.step_peak + self.states.rounding + self.states.kept)
        if self.budget - least < _LITTLE * self.budget:
            return None
        if self._within(least).seconds > (now.seconds + self._now.seconds) * (1 + _NONE):
            return None
        return 0.0, f"a budget of {format_bytes(least)} would do: nothing waits there either"

    def _least(self, step: Profile) -> int:
        """The least budget at which nothing waits, with the states on the device that are there now."""
        most, kept = max(step.moments.full), self.states.kept
        return least_memory(step, most, self._beside(step, most + kept, kept).link, _NONE).peak + kept

    def _within(self, budget: int) -> _There:
        """The step within another budget, with its layers treated as is best then."""
        now = self._planned(self.profile, budget, self.choice)
        ways = self.ways
        if ways is None:
            return now
        try:
            found = choose(ways, budget, self.link, self.states, treatable(ways, budget), now=self.choice)
            before, after = (
                self._planned(ways.stitched(choice).profile, budget, choice)
                for choice in (self.choice, found.choice)
            )
        except BudgetTooSmall:
            return now  # they were larger when all ways were tried
        # Times that were measured by now are those of the step as it is treated now.
        better = before.seconds - after.seconds
        return after._replace(seconds=now.seconds - better) if better > 0 else now

    def _planned(self, step: Profile, budget: int, choice: Choice) -> _There:
        kept, seconds = states_to_keep(step, budget, self.link, self.states)
        return _There(seconds, plan(step, budget - kept, self._beside(step, budget, kept).link).waits, choice)

    def _beside(self, step: Profile, budget: int, kept: int) -> Beside:
        """What the other states leave of the link."""
        return self.states.beside(self.link, step, budget, kept)

    @cached_property
    def _now(self) -> Beside:
        return self._beside(self.profile, self.budget, self.states.kept)

    def _again(self, now: Plan) -> _Found | None:
        """How many of the last layers are better computed again than moved, as nearly as one step shows it."""
        best, text = now.seconds, None
        numbers = sorted({layer for _, layer in layer_times(self.profile, self.names)})
        for count in range(1, len(numbers) + 1):
            if count & (count - 1) and count < len(numbers):
                continue  # powers of two, and all
            layers = numbers[-count:]
            step = checkpointed(self.profile, self.names, self.blocks, layers)
            try:
                made = plan(step, self.budget - self.states.kept, self._now.link)
            except BudgetTooSmall:
                continue
            if made.seconds < best * (1 - _NONE):
                best = made.seconds
                less = format_bytes(max(0, moved(self.profile, now) - moved(step, made)))
                again = format_seconds(step.compute - self.profile.compute)
                named, waited = layers_named(layers), format_seconds(now.waits - made.waits)
                text = (
                    f'TieringManager(recompute="auto") chooses which layers to compute again: with {named} it is '
                    f"{less} less to move, and {again} of computing in place of {waited} of waiting"
                )
        return None if text is None else (now.seconds - best, text)

    def _optimizer(self, now: Plan) -> _Found | None:
        """What stays since the first step is, as a rule, the states that the optimizer made in it."""
        if self.grown < _LITTLE * self.budget or self.states.registered:
            return None
        without = replace(self.profile, unmovable=[max(0, n - self.grown) for n in self.profile.unmovable])
        gained = now.seconds - plan(without, self.budget, self.link).seconds
        passing = self.link.exchange(self.grown)
        if gained <= passing:
            return None
        return gained - passing, (
            f"the optimizer's states take {format_bytes(self.grown)} of the device, if they are what has stayed "
            f"since the first step: register_optimizer() keeps them on the host. {format_seconds(gained)} less "
            f"waiting, for {format_seconds(passing)} in which they pass through the device"
        )

    def _drive(self) -> _Found | None:
        if self.disk is None or self.disk.plan.waits <= _NONE * self.profile.compute:
            return None
        spilled = format_bytes(sum(self.profile.nbytes[b] for b in self.disk.spill))
        waits = self.disk.plan.waits
        return waits, (
            f"the host waits {format_seconds(waits)} for the drive, to which {spilled} go in each step: with as "
            f"much more of host_bytes nothing does"
        )


def moved(profile: Profile, made: Plan) -> int:
    """The bytes that a plan moves to the host."""
    return sum(profile.nbytes[b] for b in made.copied_out(profile))


def checkpointed(
    profile: Profile, names: Sequence[Name], blocks: Sequence[Name], layers: Collection[int]
) -> Profile:
    """The step if these layers kept only the first block that they save, and computed the others in backward again.

    That block is taken for the layer's input. The others are counted as before while forward runs, and from the
    beginning of the layer's backward on, where its forward is computed once more.
    """
    times = layer_times(profile, names)
    seconds = list(profile.seconds)
    more = [0] * (len(seconds) + 1)
    used = list(profile.used)
    keep: list[int] = []
    seen: set[tuple[int, int]] = set()
    for b, (graph, layer, *_) in enumerate(blocks):
        place = graph, layer
        if layer not in layers or place not in times:
            keep.append(b)
            continue
        saved, begins, dropped = profile.saved[b], profile.backward[b], profile.dropped[b]
        ended, took = times[place]
        if place not in seen:
            seen.add(place)
            keep.append(b)
            if saved < begins < len(seconds):
                used[b] = min(used[b], begins)
                seconds[begins] += took
            continue
        for first, last in ((saved, max(saved, ended)), (begins, dropped)):
            more[first] += profile.nbytes[b]
            more[last] -= profile.nbytes[b]
    unmovable = list(map(int.__add__, profile.unmovable, accumulate(more)))
    return replace(
        profile,
        seconds=seconds,
        unmovable=unmovable,
        standing=(),
        used=[used[b] for b in keep],
        **{name: [getattr(profile, name)[b] for b in keep] for name in _KEPT if getattr(profile, name)},
    )


_FORWARD, _BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class LayerStall:
    """Compute waits for copies while a layer's forward or backward runs, or before the first layer (None).

    graph: the number of the forward in its step, from 0. seconds: as planned. measured: seconds, or None where
    they were not measured. why: what the longest of the planned waits is for, and why that is late; empty where
    none is planned.
    """

    graph: int
    layer: int | None
    backward: bool
    seconds: float
    measured: float | None
    why: str

    def __str__(self) -> str:
        where = "before the first layer"
        if self.layer is not None:
            where = f"{_BACKWARD if self.backward else _FORWARD} of layer {self.layer}"
            where += f" of graph {self.graph}" if self.graph else ""
        measured = "" if self.measured is None else f"{format_seconds(self.measured)} measured"
        if not self.why:
            return f"{where}: {measured}, not planned"
        return f"{where}: {format_seconds(self.seconds)}{measured and f' ({measured})'}; {self.why}"


_Place = tuple[int, int | None, bool]


class Stalls:
    """Says of a plan for a step where it waits and why.

    names, blocks: of the step's positions and blocks.
    """

    def __init__(self, profile: Profile, plan: Plan, names: Sequence[Name], blocks: Sequence[Name], link: Link):
        self._profile = profile
        self._plan = plan
        self._blocks = blocks
        self._link = link
        self._places = _places(names)
        self._clock = profile.clock
        self._out = plan.copied_out(profile)
        self._back = sorted(plan.reload, key=lambda b: (plan.reload[b], profile.used[b]))
        self._late: list[float] = []  # before each stall
        late = 0.0
        for stall in plan.stalls:
            self._late.append(late)
            late += stall.seconds

    def by_layer(self, waits: Sequence[float] = (), names: Sequence[Name] = ()) -> tuple[LayerStall, ...]:
        """The longest first.

        waits: measured seconds at the last positions of a step with these names; empty is not measured.
        """
        found: dict[_Place, LayerStall] = {}
        longest: dict[_Place, int] = {}
        stalls = self._plan.stalls
        for i, stall in enumerate(stalls):
            place = self._places[stall.position]
            before = found.get(place) or LayerStall(*place, 0.0, 0.0 if waits else None, "")
            found[place] = replace(before, seconds=before.seconds + stall.seconds)
            if place not in longest or stall.seconds > stalls[longest[place]].seconds:
                longest[place] = i
        for place, wait in zip(_places(names)[len(names) - len(waits) :], waits, strict=True):
            if wait > 0:
                before = found.get(place) or LayerStall(*place, 0.0, 0.0, "")
                found[place] = replace(before, measured=(before.measured or 0.0) + wait)
        told = [replace(each, why=self._why(longest[at]) if at in longest else "") for at, each in found.items()]
        return tuple(sorted(told, key=lambda each: max(each.seconds, each.measured or 0.0), reverse=True))

    def _why(self, i: int) -> str:
        """What a stall waits for, and why that has not ended."""
        stall = self._plan.stalls[i]
        b = stall.block
        end = self._clock[stall.position] + self._late[i] + stall.seconds
        if stall.cause is Cause.RELEASE:
            what = f"the release of {self._named([b])} waits for its copy out"
            issued = self._at(self._plan.early.get(b, self._profile.saved[b]))
            queue, rate = self._out, self._link.out
        else:
            what = f"waits for the reload of {self._named([b])}"
            issued = self._at(self._plan.reload[b], reloads=True)
            queue, rate = self._back, self._link.back
        begun = end - self._seconds(b, rate)
        before = self._in_front(queue, queue.index(b), begun - issued, rate)
        if before:
            return f"{what}: the link is busy with {self._named(before)} before it"
        earlier = end - stall.seconds - issued
        if stall.cause is Cause.RELEASE:
            return f"{what}: it was saved only {format_seconds(earlier)} before"
        if earlier <= 0:
            return f"{what}: there is no room for it before its use"
        return f"{what}: there is room for it only {format_seconds(earlier)} before its use"

    def _at(self, position: int, *, reloads: bool = False) -> float:
        """When a position comes, with the stalls before it; for reloads, with what is released there as well."""
        late = 0.0
        for stall in self._plan.stalls:
            if stall.position < position or (reloads and self._released(stall, position)):
                late += stall.seconds
        return self._clock[position] + late

    @staticmethod
    def _released(stall: PlannedStall, position: int) -> bool:
        return stall.position == position and stall.cause is Cause.RELEASE

    def _in_front(self, queue: Sequence[int], place: int, seconds: float, rate: float) -> list[int]:
        """The copies that keep a queue busy for so long before the one at a place; none for less than its own time.

        A copy that shares the link with the other direction takes longer than it should, up to that much.
        """
        own = self._seconds(queue[place], rate)
        if seconds <= own * max(0.1, 1 / self._link.both - 1):
            return []
        found: list[int] = []
        for b in reversed(queue[:place]):
            found.append(b)
            seconds -= self._seconds(b, rate)
            if seconds <= 0.05 * own:
                break
        return found

    def _seconds(self, b: int, rate: float) -> float:
        return self._profile.nbytes[b] / rate + self._link.latency

    def _named(self, blocks: Iterable[int]) -> str:
        """Such as "36.0 MiB of layers 4 to 6"."""
        blocks = list(blocks)
        nbytes = sum(self._profile.nbytes[b] for b in blocks)
        return f"{format_bytes(nbytes)} of {layers_named(self._blocks[b][1] for b in blocks)}"


def layers_named(numbers: Iterable[int]) -> str:
    """Such as "layer 4" and "layers 4 to 6"."""
    first, last = min(found := set(numbers)), max(found)
    return f"layer {first}" if first == last else f"layers {first} to {last}"


def _places(names: Sequence[Name]) -> list[_Place]:
    """Of each position the graph, and the layer that began last."""
    place: _Place = (0, None, False)
    found = []
    for name in names:
        if name[0] in (_FORWARD, _BACKWARD):
            place = (name[1], name[2], name[0] == _BACKWARD)
        found.append(place)
    return found


def layer_times(profile: Profile, names: Sequence[Name]) -> dict[tuple[int, int], tuple[int, float]]:
    """Of each graph's layers the position at which the forward ends, and its seconds."""
    begun: dict[tuple[int, int], int] = {}
    found = {}
    clock = profile.clock
    for k, name in enumerate(names):
        if name[0] == _FORWARD:
            begun[name[1], name[2]] = k
        elif name[0] == "end" and (first := begun.get((name[1], name[2]))) is not None:
            found[name[1], name[2]] = (k, clock[k] - clock[first])
    return found

"""What would make a step wait less, in words and numbers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from ...sizes import format_bytes, format_seconds
from .bound import BudgetTooSmall
from .link import Link
from .names import Name
from .needs import explained
from .plan import DiskPlan, Plan
from .planner import plan
from .profile import Profile
from .repertoire import least_memory
from .share import StatesShare, states_to_keep
from .stalls import layer_times, layers_named

# Of the step's compute time: so much waiting is none.
_NONE = 0.005
# Of the budget: what is less is not worth a line.
_LITTLE = 0.05
_MOST = 3
# What a profile has of each block that a checkpoint leaves as it is.
_KEPT = ("nbytes", "saved", "dropped", "backward", "loose")

# The seconds that a step is shorter with it, and the sentence.
_Found = tuple[float, str]


@dataclass(frozen=True)
class Adviser:
    """Advises on one step within a budget.

    names, blocks: of the step's positions and blocks. budget: for all, with optimizer states. grown: bytes that
    have come to stay on the device since the first step began. disk: the plan for the drive, if there is one.
    states: of optimizers, which a plan has stay on the device or not.
    """

    profile: Profile
    names: Sequence[Name]
    blocks: Sequence[Name]
    budget: int
    link: Link
    grown: int = 0
    disk: DiskPlan | None = None
    states: StatesShare = field(default_factory=StatesShare)

    def advice(self) -> tuple[str, ...]:
        """At most three sentences, what helps the most first. It takes about twenty plans."""
        try:
            now = plan(self.profile, self.budget - self.states.kept, self.link)
        except BudgetTooSmall as error:
            return (str(explained(error, self.profile, self.names, self.states)),)
        if now.waits > _NONE * self.profile.compute:
            found = [self._larger(now), self._checkpoints(now), self._optimizer(now), self._drive()]
        else:
            found = [self._smaller(now), self._drive()]
        told = sorted((each for each in found if each is not None), reverse=True)
        return tuple(text for _, text in told[:_MOST])

    def _larger(self, now: Plan) -> _Found | None:
        """A budget is advised as it was tried: with as many states on the device as would stay there then."""
        least = self._least()
        kept, seconds = states_to_keep(self.profile, least, self.link, self.states)
        waits = plan(self.profile, least - kept, self.link).waits
        saved = now.seconds + self._passing(self.states.kept) - seconds
        if saved <= _NONE * now.seconds:
            return None
        hides = "hide all copies, and " if waits <= _NONE * now.seconds else ""
        return saved, f"a budget of {format_bytes(least)} would {hides}save {format_seconds(saved)}"

    def _smaller(self, now: Plan) -> _Found | None:
        least = max(self._least(), self.states.step_peak + self.states.rounding + self.states.kept)
        if self.budget - least < _LITTLE * self.budget:
            return None
        _, seconds = states_to_keep(self.profile, least, self.link, self.states)
        if seconds > (now.seconds + self._passing(self.states.kept)) * (1 + _NONE):
            return None
        return 0.0, f"a budget of {format_bytes(least)} would do: nothing waits there either"

    def _least(self) -> int:
        """The least budget at which nothing waits, with the states on the device that are there now."""
        most = max(self.profile.moments.full)
        return least_memory(self.profile, most, self.link, _NONE).peak + self.states.kept

    def _passing(self, kept: int) -> float:
        """The seconds in which the other states cross the link."""
        return (self.states.total - kept) / (min(self.link.out, self.link.back) * self.link.both)

    def _checkpoints(self, now: Plan) -> _Found | None:
        """How many of the last layers are better computed twice than moved."""
        best, text = now.seconds, None
        numbers = sorted({layer for _, layer in layer_times(self.profile, self.names)})
        for count in range(1, len(numbers) + 1):
            if count & (count - 1) and count < len(numbers):
                continue  # powers of two, and all
            layers = numbers[-count:]
            step = checkpointed(self.profile, self.names, self.blocks, layers)
            try:
                made = plan(step, self.budget - self.states.kept, self.link)
            except BudgetTooSmall:
                continue
            if made.seconds < best * (1 - _NONE):
                best = made.seconds
                less = format_bytes(max(0, moved(self.profile, now) - moved(step, made)))
                again = format_seconds(step.compute - self.profile.compute)
                text = (
                    f"checkpoint {layers_named(layers)}: {less} less to move, and {again} of computing again in "
                    f"place of {format_seconds(now.waits - made.waits)} of waiting"
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
    return sum(profile.nbytes[b] for b in made.release)


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
    for b, (graph, layer, _) in enumerate(blocks):
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

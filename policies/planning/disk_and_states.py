"""What shares memory with activations, a disk and optimizer states; and what is said where there is too little."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from ...sizes import format_bytes
from .planner import plan
from .profile import BudgetTooSmall, DiskPlan, Link, Plan, Profile, floor
from .recording import Name, spoken

# Of the link back, what activations have at least while states cross it too.
_LEAST_SHARE = 1 / 8
# So many amounts are compared, each for a step with a plan of so many attempts.
_AMOUNTS = 8
_ATTEMPTS = 3


class Beside(NamedTuple):
    """What optimizer states leave of the link, and what they cost.

    link: what activations have of it. late: the seconds by which forward and backward are longer, beside the waits
    for activations. after: the seconds in which states cross it in the optimizer's step, where nothing hides that.
    """

    link: Link
    late: float
    after: float

    @property
    def seconds(self) -> float:
        return self.late + self.after


@dataclass(frozen=True)
class Crossing:
    """Optimizer states that cross the link, in each direction, beside one part of a step.

    sharing: the bytes of those that do so where they do not stay on the device. others: of those that do so always.
    first: of both, the bytes that the part waits for before any of them are hidden.
    """

    sharing: int = 0
    others: int = 0
    first: int = 0


@dataclass
class StatesShare:
    """What there is to say between whoever has optimizer states and whoever plans for activations.

    total: the bytes of states that may stay on the device between steps. kept: of those that are there by now.
    target: how many shall be; None as long as nothing is planned.
    forward, backward: what crosses the link beside these. All else that does not stay crosses it in the optimizer's
    step.
    budget: the bytes of the device that all may take together. None: any.
    step_peak: the most bytes of the device while the optimizer steps, with all else and without those kept.
    rounding: by which torch's pool may give more for what is kept than is asked for.
    registered: whether there is an optimizer, wherever its states are. at_once: whether one is stepped at once.
    settled: whether they are stepped as they will be, and not all in their own step, as the first one is.
    """

    total: int = 0
    kept: int = 0
    target: int | None = None
    forward: Crossing = Crossing()
    backward: Crossing = Crossing()
    budget: int | None = None
    step_peak: int = 0
    rounding: int = 0
    registered: bool = False
    at_once: bool = False
    settled: bool = True

    @property
    def planned(self) -> int:
        return self.target or 0

    def crossing(self, kept: int) -> tuple[int, int]:
        """The bytes that cross the link in forward, and in backward, where so many stay on the device.

        Those stay first that would cross it in the optimizer's step, where nothing hides that; then those of
        forward, as it is shorter than backward.
        """
        left = self.total - kept
        backward = min(self.backward.sharing, left)
        forward = min(self.forward.sharing, left - backward)
        return self.forward.others + forward, self.backward.others + backward

    def beside(self, link: Link, step: Profile, budget: int, kept: int) -> Beside:
        """What they leave of a link in a step within a budget for all, if so many bytes stay on the device."""
        away = max(step.full, default=0) + kept - budget
        return self.left(link, step.in_forward, step.in_backward, away, kept)

    def left(self, link: Link, forward: float, backward: float, away: int, kept: int) -> Beside:
        """The same for a step of which some is known.

        forward, backward: their seconds without stalls. away: the bytes of activations that have to leave in the
        one and come back in the other at least.

        Both share the link for as long as that part of the step lasts. Where it is too short, it takes as long as
        they need.
        """
        in_forward, in_backward = self.crossing(kept)
        moving = self.total - kept + self.forward.others + self.backward.others
        after = link.exchange(moving - in_forward - in_backward)
        out, late = _shared(link, forward, in_forward, self.forward.first, max(0, away) / link.out)
        back, later = _shared(link, backward, in_backward, self.backward.first, max(0, away) / link.back)
        if in_forward or in_backward:
            link = replace(link, out=link.out * out, back=link.back * back)
        return Beside(link, late + later, after)

    def fit(self, budget: int) -> bool:
        """Whether what shall be kept leaves the optimizer's step its room."""
        return not self.target or self.target + self.step_peak <= budget


def _shared(link: Link, lasts: float, crossing: int, first: int, blocks: float) -> tuple[float, float]:
    """What of the link activations have in a part of a step beside states, and the seconds by which it is longer.

    lasts: its seconds without stalls. crossing: the bytes of states. first: of these what it waits for at its
    begin. blocks: the seconds that activations need of the link, if they have it alone.
    """
    if not crossing:
        return 1.0, 0.0
    states = link.exchange(crossing)
    longer = max(lasts, states + blocks)
    share = max(_LEAST_SHARE, 1 - states / longer)
    return share, max(0.0, longer - max(lasts, blocks / share)) + link.exchange(min(first, crossing))


def states_to_keep(profile: Profile, budget: int, link: Link, states: StatesShare) -> tuple[int, float]:
    """How many bytes of optimizer states had better stay on the device, and the seconds of the step then.

    What stays takes room from activations all the time, and then these wait for more copies, hidden as they are.
    What does not crosses the link in both directions: while the optimizer steps, where nothing hides that, or in
    backward, where activations have less of the link then. The least sum counts; of equal ones the one that keeps
    the least. It is compared for eight parts of all states, and for the most that there is room for. Raises
    BudgetTooSmall.
    """
    room = budget - states.rounding - max(states.step_peak, floor(profile.moments))
    amounts = {states.total * part // _AMOUNTS for part in range(_AMOUNTS + 1)}
    amounts.add(max(0, min(room, states.total)))
    best, least = 0, float("inf")
    for kept in sorted(amounts):
        if 0 < kept > room:
            break
        beside = states.beside(link, profile, budget, kept)
        try:
            seconds = plan(profile, budget - kept, beside.link, attempts=_ATTEMPTS).seconds + beside.seconds
        except BudgetTooSmall:
            if not kept:
                raise
            break  # what would have to leave for them finds no room
        if seconds < least:
            best, least = kept, seconds
    return best, least


# Of the host's bytes, what is kept for slots that are free by the plan, and that nobody has taken back yet.
_SPARE = 1 / 16
# How many times faster reloads are begun than the plan has it, as a link without work is lost time.
_PACE = 1.15
# How many times longer than it takes a copy is given that is begun as late as can be.
_LEAD = 1.5


def plan_disk(profile: Profile, first: Plan, host_bytes: int, link: Link, drive: Link) -> DiskPlan:
    """Plans the drive for a step whose plan for the device is `first`, over that link.

    To the drive the host is what the device is to the link. A block has a place there from its offload on, can be
    written when that copy has ended, has to be there again when its reload begins, and leaves when that has ended.
    The times are those of the first plan, with its stalls.

    A copy that has to wait for its link needs no place meanwhile. So each is put off: until the link is about to
    come to it, which costs no time; or, where the host is too small or the drive too slow for that, until it would
    be late. The faster of the two counts.

    host_bytes: what the host has. Raises BudgetTooSmall where it cannot even hold what is being copied.
    """
    places = [_soon(profile, first, link), _late(profile, first, link)]
    made: list[DiskPlan] = []
    for each in places:
        try:
            made.append(each.planned(profile, first, host_bytes - int(host_bytes * _SPARE), drive))
        except BudgetTooSmall:
            # In no variable: the error would keep all that is under way, and itself.
            if each is places[-1] and not made:
                raise
        else:
            if not made[-1].plan.stalls:
                break
    return min(made, key=lambda disk: disk.plan.seconds)


def paced(profile: Profile, made: Plan, link: Link) -> Plan:
    """The plan with each reload begun while the one before it is under way, and not before.

    What begins as soon as there is room for it would come in bursts, behind which optimizer states are late that
    cross the link beside it. link: what is left of it.
    """
    return replace(made, reload=_soon(profile, made, replace(link, back=_PACE * link.back)).reload)


class _Places:
    """When the blocks that leave the device have places on the host.

    offload, landed: the positions at which the copy to the host begins, and by which it has ended. reload, gone:
    the same of the copy back; one position twice for a block that is never used.
    """

    def __init__(self, profile: Profile, first: Plan) -> None:
        seconds = list(profile.seconds)
        for stall in first.stalls:
            seconds[max(0, stall.position - 1)] += stall.seconds
        self.seconds = seconds
        self.at = [0.0, *accumulate(seconds)]
        self.offload: dict[int, int] = {}
        self.landed: dict[int, int] = {}
        self.reload: dict[int, int] = {}
        self.gone: dict[int, int] = {}
        for b in first.release:
            if profile.used[b] == profile.dropped[b]:
                self.reload[b] = self.gone[b] = profile.dropped[b]

    def before(self, at: float) -> int:
        """The last position that comes by then."""
        return bisect_right(self.at, at) - 1

    def planned(self, profile: Profile, first: Plan, budget: int, drive: Link) -> DiskPlan:
        positions = len(self.seconds)
        blocks = sorted(self.landed, key=self.landed.__getitem__)
        change = [0] * (positions + 1)
        for b in blocks:
            change[self.offload[b]] += profile.nbytes[b]
            change[self.landed[b]] -= profile.nbytes[b]
        second = Profile(
            self.seconds,
            list(accumulate(change))[:positions],
            [profile.nbytes[b] for b in blocks],
            [self.landed[b] for b in blocks],
            [self.reload[b] for b in blocks],
            [self.gone[b] for b in blocks],
            [self.reload[b] for b in blocks],
        )
        made = plan(second, budget, drive)
        fetch = {blocks[i]: k for i, k in made.reload.items() if second.used[i] < second.dropped[i]}
        return DiskPlan(self.offload, self.reload, {blocks[i]: k for i, k in made.release.items()}, fetch, made)


def _soon(profile: Profile, first: Plan, link: Link) -> _Places:
    """Each copy is issued while the one before it on the link is under way."""
    places = _Places(profile, first)
    at = places.at
    free = 0.0
    for b in sorted(first.release):
        seconds = profile.nbytes[b] / link.out + link.latency
        begin = max(at[profile.saved[b]], free)
        free = begin + seconds
        release = first.release[b]
        places.offload[b] = min(max(profile.saved[b], places.before(begin - seconds)), release - 1)
        places.landed[b] = min(max(bisect_left(at, free), places.offload[b] + 1), release)
    free = 0.0
    for b in sorted(first.reload.keys() - places.gone, key=lambda b: (first.reload[b], profile.used[b])):
        seconds = profile.nbytes[b] / link.back + link.latency
        begin = max(at[first.reload[b]], free)
        free = min(begin + seconds, at[profile.used[b]])
        places.reload[b] = min(max(first.reload[b], places.before(begin - seconds)), profile.used[b])
        places.gone[b] = min(max(bisect_left(at, free), places.reload[b] + 1), len(places.seconds))
    return places


def _late(profile: Profile, first: Plan, link: Link) -> _Places:
    """Each copy is issued when a somewhat slower link would just be in time."""
    places = _Places(profile, first)
    at = places.at
    free = float("inf")
    for b in sorted(first.release, key=first.release.__getitem__, reverse=True):
        free = min(free, at[first.release[b]]) - _LEAD * (profile.nbytes[b] / link.out + link.latency)
        places.offload[b] = min(max(profile.saved[b], places.before(free)), first.release[b] - 1)
        places.landed[b] = first.release[b]
    free = float("inf")
    for b in sorted(first.reload.keys() - places.gone, key=profile.used.__getitem__, reverse=True):
        used = profile.used[b]
        free = min(free, at[used]) - _LEAD * (profile.nbytes[b] / link.back + link.latency)
        places.reload[b] = min(max(first.reload[b], places.before(free)), used)
        places.gone[b] = min(used + 1, len(places.seconds))
    return places


def explained(
    error: BudgetTooSmall, profile: Profile, names: Sequence[Name], states: StatesShare | None = None
) -> BudgetTooSmall:
    """The same error in the words of the step, and with what would help, the largest part first.

    states: of the optimizers that are registered, where that is known.
    """
    end = len(names)
    k = next((k for k in range(error.position, end) if profile.unmovable[k] >= error.unmovable), error.position)
    standing = profile.standing[k] if profile.standing else 0
    before = min(standing, profile.standing[0] if profile.standing else 0)
    passing = error.unmovable - standing
    in_use = error.floor - error.unmovable - error.without_room
    after_all_uses = all(used <= k for used in profile.used)
    # The end of the backward is there too, and is more where the first layer is in a checkpoint of the user's.
    step_is_less = states is not None and 0 < states.step_peak < error.floor
    if after_all_uses and not step_is_less:
        where = "what follows the backward, as a rule the optimizer's step"
        helps = [(error.floor, _less_for_the_step(error.floor, states))]
    else:
        where = "what the backward does after the last use of a block" if after_all_uses else spoken(names[k])
        alone = passing + in_use
        helps = [(alone, f"smaller microbatches: {format_bytes(alone)} are for this alone")]
        if states is None or not states.registered:
            helps.append(
                (before, "register the optimizer, so that its states are on the host (register_optimizer)")
            )
        layers, less = _checkpointed(profile, names, k, error.floor - error.budget)
        if layers:
            helps.append((standing - before, f"checkpoint {layers}: {format_bytes(less)} less, or lower min_bytes"))
    parts = (
        f"{where}, {format_bytes(before)} are from before the step, {format_bytes(standing - before)} have come in "
        f"it and cannot leave, {format_bytes(passing)} come and go, and {format_bytes(in_use)} are saved and in use"
    )
    if error.without_room:
        lacking = format_bytes(error.floor - error.budget)
        parts += f"; {format_bytes(error.without_room)} could leave, and find no room on the host"
        helps.append((error.floor, f"{lacking} more of host_bytes, or a spill_dir"))
    told = [text for part, text in sorted(helps, reverse=True) if part > 0]
    return BudgetTooSmall(
        error.budget, error.floor, error.position, error.unmovable, parts, told, error.without_room
    )


def _less_for_the_step(taken: int, states: StatesShare | None) -> str:
    if states is None or not states.registered:
        return (
            f"the optimizer step, or the end of the backward, takes {format_bytes(taken)}: register the optimizer, "
            "with small bucket_bytes, or make the microbatches smaller"
        )
    how = "register the optimizer with smaller bucket_bytes"
    if states.at_once:
        how = "register it with separable=True, if it steps each parameter by itself, and with small bucket_bytes"
    return f"the optimizer step takes {format_bytes(taken)}: {how}"


def _checkpointed(profile: Profile, names: Sequence[Name], k: int, over: int) -> tuple[str, int]:
    """The last layers that have kept so many bytes at a position, or all that have any, and their bytes.

    What a layer keeps beside its blocks is too small for one, or cannot leave. A checkpoint does not save it.
    """
    if not profile.standing:
        return "", 0
    begun: dict[tuple[int, int], int] = {}
    kept: dict[tuple[int, int], int] = {}
    for name, bytes_now in zip(names[: k + 1], profile.standing, strict=False):
        match name:
            case "forward", graph, layer, _:
                begun.setdefault((graph, layer), bytes_now)
            case "end", graph, layer, _ if (graph, layer) in begun:
                kept[graph, layer] = bytes_now - begun[graph, layer]
            case "backward", graph, layer, _:
                kept.pop((graph, layer), None)
    chosen: set[int] = set()
    less = 0
    for (_, layer), nbytes in sorted(kept.items(), key=lambda item: item[0][1], reverse=True):
        if less >= over and layer not in chosen:
            break
        if nbytes > 0:
            chosen.add(layer)
            less += nbytes
    if not chosen:
        return "", 0
    first, last = min(chosen), max(chosen)
    return f"layer {last}" if first == last else f"layers {first} to {last}", less

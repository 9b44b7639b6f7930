"""Records one step, plans the next ones, and keeps to a budget of device memory whatever comes."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from ..sizes import format_bytes, parse_bytes
from .base import (
    Action,
    Dropped,
    Event,
    ExactMemory,
    Fetch,
    ForwardBegin,
    ForwardEnd,
    HostPressure,
    LayerBegin,
    LayerEnd,
    Memory,
    Offload,
    OnRequest,
    Refused,
    Release,
    Reload,
    Saved,
    Spill,
    StepBegin,
    StepEnd,
    StepMeasured,
    Used,
)
from .lru import LRUPolicy
from .planning.bound import BudgetTooSmall
from .planning.link import Link
from .planning.names import Name
from .planning.repertoire import Repertoire
from .planning.report import Account, Report
from .planning.residence import Place, Residence
from .planning.share import StatesShare
from .planning.step import StepUnderWay
from .planning.table import Table

_log = logging.getLogger("tiered_mem.policies")
# Steps from one that is timed to the next, at least, for the same kind of step.
_PATIENCE = 4
# So many steps that are of no known kind are recorded in a row. After that it is each fourth.
_STRAYS = 8
# Of the step's time: stalls above the prediction by more than this are a reason to plan anew.
_DRIFT = 0.02
# So much less is used after each step that went above the budget, as a share of it, and at most.
_MARGIN = 0.01
_MOST_MARGIN = 0.05
_FETCHED_AHEAD = 8
# Optimizer states pass through this part of the budget.
_PASSING = 16
_POSITIONS = frozenset({ForwardBegin, LayerBegin, Saved, LayerEnd, ForwardEnd, Used, Dropped})
_PLAYED: frozenset[type[OnRequest]] = frozenset({Used, StepBegin, StepEnd, Memory, Refused})
_TIMED = _PLAYED | {StepMeasured}
_RECORDED = _TIMED - {Memory} | {ExactMemory}


class PlannedPolicy:
    """Keeps all of the device's memory below `budget`, with as little waiting as a plan can find.

    The first step runs under LRUPolicy, is recorded, and measured. From then on each step plays a plan made from
    the record: which blocks leave, before which event each is released, and at which it is reloaded. Steps of
    other lengths have plans of their own, scaled from the same record; one with other events is recorded too.
    Where a step does not go as planned, what is leaving is released early, and then the oldest blocks leave: that
    costs time and keeps the budget.

    budget: bytes of the device for everything, an int or a string such as "60GiB".
    fragments: of these, what lies unused in torch's pool between tensors. When a step has been recorded it is what
        that step had at its fullest and half of `fragments`, but at least `fragments` and at most a quarter of the
        budget. Where a step has more of it, blocks leave earlier. None: the budget is for what is allocated.
    link: the rates of copies.
    slowdown: a step may be longer by this share of its compute time, if that saves memory. None uses the budget.
    host_bytes: what the host tier holds. With a link that has a drive, spills and fetches are planned too.
    margin: bytes of the budget that are used only where a step needs them. After each step above the budget it is
        1 % more, up to 5 %.

    states: what is said of optimizer states that may have a part of the budget.

    Raises ValueError for a size below 1 byte and a slowdown below 0. `decide` raises BudgetTooSmall, once a step is
    measured, where no plan can keep the budget.
    """

    gather_bytes = 1  # each block is told of at once

    def __init__(
        self,
        budget: int | str,
        link: Link,
        *,
        fragments: int | None = None,
        slowdown: float | None = None,
        host_bytes: int | str | None = None,
        margin: int = 0,
    ) -> None:
        if slowdown is not None and not slowdown >= 0:
            raise ValueError(f"slowdown is a share of a step's time and at least 0, not {slowdown}")
        self._given = parse_bytes(budget)
        self._fragments = fragments
        self._budget = self._limit = self._given - (fragments or 0)
        if self._budget < 1:
            raise ValueError(f"of {format_bytes(self._given)} nothing is left beside fragments")
        host = None if host_bytes is None else parse_bytes(host_bytes)
        self.states = StatesShare(passing=self._given // _PASSING)
        self._margin = margin
        self._repertoire = Repertoire(self._budget, link, host, slowdown, self.states, margin)
        self._residence = Residence()
        self._memory: Memory | None = None
        self._step: StepUnderWay | None = None
        self._ended: dict[int, StepUnderWay] = {}
        self._lru: LRUPolicy | None = None
        self.account = Account(self._repertoire)
        self._overruns = 0
        self._untimed = 0  # steps since the last that was timed
        self._strays = 0  # steps since the last that was of a known kind
        self.asks: Collection[type[OnRequest]] = _RECORDED

    @property
    def resident(self) -> int:
        """The bytes of blocks that it takes to be on the device."""
        return self._residence.resident

    @property
    def _room(self) -> int:
        """The budget, less what optimizer states have of it, what lies unused by now, and the margin if it can."""
        room, step = self._limit - self.states.kept, self._step
        least = room - self._margin
        return least if step is None or step.table is None or step.table.plan.peak <= least else room

    @property
    def plans_spills(self) -> bool:
        """Whether what goes to disk follows from the plan of the step that goes on."""
        return self._step is not None and self._step.table is not None and self._step.table.disk is not None

    def check(self, num_layers: int) -> None:
        """Suits every model."""

    def report(self) -> Report:
        """What the last plan promises, and what came of it. Raises RuntimeError as long as there is none."""
        return self.account.report()

    def decide(self, event: Event) -> Sequence[Action]:
        if type(event) in _POSITIONS:  # nearly all of them
            return self._position(event)
        match event:
            case Memory(device, peak, reserved):
                if self._fragments is not None and reserved:
                    between = reserved - device + self._fragments // 2
                    self._limit = min(self._budget, self._given - between)
                if kept := self.states.kept:
                    # What is kept of optimizer states is neither others' memory nor of the activations' budget.
                    event = type(event)(device - kept, peak - kept, reserved - kept)
                self._memory = event
                if self._step is not None:
                    self._step.hear(event, self._residence.own)
            case StepBegin(step):
                self._begin(step)
            case StepEnd():
                self._end()
            case StepMeasured(step, seconds, stalls, out, back):
                ended = self._ended.pop(step, None)
                if ended is not None:
                    self.account.measured(ended, event)
                    self._learn(ended, seconds, stalls, out, back)
            case Refused(action):
                self._residence.refused(action)
                if self._step is not None and type(action) is Reload:
                    self._step.returning.appendleft(action.key)
            case HostPressure(nbytes):
                return self._spill(nbytes)
        return ()

    def _begin(self, number: int) -> None:
        self._end()  # where nobody said so
        self._residence.begin_step()
        self._step = StepUnderWay(number)

    def _end(self) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        self._untimed = 0 if StepMeasured in self.asks else self._untimed + 1
        self._strays = self._strays + 1 if step.deviates else 0
        self._ended = {number: ended for number, ended in self._ended.items() if number > step.number - _PATIENCE}
        self._ended[step.number] = step
        self.account.ended(step)
        if step.table is not None and step.peak > self._budget - self.states.kept:
            self._overrun(step.peak + self.states.kept)
        if self._fragments is not None and step.reserved:
            found = step.reserved - step.allocated + self._fragments // 2
            found = max(self._fragments, min(found, self._given // 4))
            if step.exact or found > self._given - self._budget + self._given * _MARGIN:
                self._leave_out(found)
        self.asks = _TIMED if self._untimed >= _PATIENCE - 1 else _PLAYED
        if not self._repertoire or (step.deviates and step.recording.regular and not step.exact):
            self._record(step.number + 1)

    def _record(self, step: int) -> None:
        """This step is of no kind that is known."""
        if self._strays <= _STRAYS or step % _PATIENCE == 0:
            self.asks = _RECORDED

    def _leave_out(self, fragments: int) -> None:
        """So many bytes of what was given are not to be used."""
        self._budget = self._limit = max(1, self._given - fragments)
        self._repertoire.replan(self._budget, self._margin)

    def _overrun(self, peak: int) -> None:
        self._overruns += 1
        if self._margin < _MOST_MARGIN * self._budget:
            self._margin += int(_MARGIN * self._budget)
        self._leave_out(self._given - self._budget)
        if self._overruns >= 3:
            _log.warning(
                "a step took %s where the budget is %s, for the %d. time: a larger budget would be kept",
                format_bytes(peak),
                format_bytes(self._budget),
                self._overruns,
            )

    def _position(self, event: Event) -> Sequence[Action]:
        """An event of a step, or one between steps."""
        memory, self._memory = self._memory, None
        step, residence = self._step, self._residence
        again: Sequence[int] = ()
        if isinstance(event, Saved):
            again = residence.save(event.blocks)
        elif isinstance(event, Dropped):
            for key in event.keys:
                residence.drop(key)
        others = None if memory is None else memory.device - residence.own
        name = None if step is None else step.take(event, others)
        # What is used now comes before all that is only due.
        actions: list[Action] = []
        in_use: Collection[int] = () if step is None else step.in_use
        if isinstance(event, Used):
            in_use = in_use or (event.key,)
            if residence.place(event.key) not in (Place.LEAVING, Place.SINKING):
                actions = residence.follow([Reload(event.key)])
            residence.use(event.key)
        if step is not None and step.undecided:
            self._choose(step)
        if step is None or step.table is None or name is None:
            actions += residence.follow(self._learning(others).decide(event))
            if others is None:
                return actions
            # What comes next is not known, and may be twice as much as any that came before.
            return actions + self._guard(others + (0 if step is None else 2 * step.rise), in_use)
        advice = step.table.actions(name, step.names)
        if advice or again:
            advice = [*map(Offload, again), *advice]
            actions += residence.follow([each for each in advice if type(each) is not Reload])
            step.returning += [each.key for each in advice if type(each) is Reload]
        if others is not None:
            actions += self._guard(step.table.beside(name, others), in_use)
        if step.returning:
            actions += self._bring_back(step, step.table, name, others or 0)
        return actions

    def _bring_back(self, step: StepUnderWay, table: Table, event: Name, others: int) -> list[Action]:
        """Reloads what is due, as far as there is room for it; the rest waits for a later event."""
        residence, names = self._residence, step.names
        actions: list[Action] = []
        while step.returning:
            key = step.returning[0]
            block = names.block(key)
            if residence.place(key) in (Place.HOST, Place.DISK):
                own = residence.own + residence.nbytes(key)
                if table.needed(event, block, own, others) > self._room:
                    break
            step.returning.popleft()
            unplanned = table.disk is None and residence.any_at(Place.DISK)
            coming = table.following(block, _FETCHED_AHEAD) if unplanned else ()
            fetched = [Fetch(other) for each in coming if (other := names.key(each)) is not None]
            actions += residence.follow([Reload(key), *fetched])
        return actions

    def _choose(self, step: StepUnderWay) -> None:
        """Finds the plan for a step, by what it has done so far. One that is of no known kind is recorded."""
        found = self._repertoire.find(step.recording.course, step.sizes, step.recording.standing[0])
        if found is None:
            self._record(step.number)
        elif step.sizes:
            step.play(*found, table := self._repertoire.table(*found))
            self.account.chosen(table)
            self._lru = None
            if step.longer:
                self._record(step.number)

    def _learning(self, others: int | None) -> LRUPolicy:
        """What decides where there is no plan."""
        if self._lru is None:
            self._lru = LRUPolicy(max(1, (self._room - (others or 0)) // 2))
        return self._lru

    def _guard(self, beside: int, in_use: Collection[int]) -> list[Action]:
        """Keeps the budget until the next event, at which others take so many bytes beside the step's blocks."""
        over = self._residence.own + beside - self._room
        return self._residence.free(over, in_use) if over > 0 else []

    def _spill(self, nbytes: int) -> list[Action]:
        if self._lru is not None:
            return self._residence.follow(self._lru.decide(HostPressure(nbytes)))
        step, residence = self._step, self._residence
        on_host = list(residence.at(Place.HOST))
        if step is not None and step.table is not None:
            place = step.table.place
            names = step.names
            on_host.sort(key=lambda key: place(names.block(key)), reverse=True)
        actions: list[Action] = []
        for key in (*on_host, *residence.at(Place.LEAVING)):
            if nbytes <= 0:
                break
            nbytes -= residence.nbytes(key)
            actions += residence.follow([Release(key), Spill(key)])
        return actions

    def _learn(self, step: StepUnderWay, seconds: Sequence[float], stalls: float, out: float, back: float) -> None:
        missing = len(step.recording.names) - len(seconds)
        if missing < 0:
            return
        repertoire, recording = self._repertoire, step.recording
        if step.known is None or step.deviates or (step.longer and step.exact):
            if step.exact and recording.regular and not repertoire.same(recording):
                try:
                    repertoire.add(recording, seconds, step.known, step.variant)
                except BudgetTooSmall as error:
                    if self._fragments is None or error.floor > self._given:
                        raise
                    self._leave_out(self._given - error.floor)  # it did run
                    repertoire.add(recording, seconds, step.known, step.variant)
                self.asks = _TIMED if missing else _PLAYED
        elif step.table is not None and len(seconds) == len(step.known.names):
            planned = step.table.plan
            surprise = abs(stalls - sum(stall.seconds for stall in planned.stalls))
            if step.known.guessed or surprise > _DRIFT * planned.seconds:
                repertoire.drift(step.known, step.variant, seconds, out, back)

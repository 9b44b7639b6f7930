"""Records one step, plans the next ones, and keeps to a budget of device memory whatever comes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..ground.arguments import instance, number, whole_number
from ..sizes import format_bytes, parse_bytes
from .actions import Action, Advice, Keep, OfLayer, Recompute
from .base import (
    POSITIONS,
    Event,
    ExactMemory,
    ForwardBegin,
    HostPressure,
    LayerBegin,
    LayerEnd,
    LayerMemory,
    Memory,
    MoreBlocks,
    OnRequest,
    Policy,
    Recomputed,
    Refused,
    StepBegin,
    StepEnd,
    StepMeasured,
    Used,
)
from .places import Places
from .planning.disk_and_states import StatesShare
from .planning.player import Ease, Player
from .planning.profile import BudgetTooSmall, Link
from .planning.repertoire import Repertoire
from .planning.report import Account, Overrun, OverrunCause, Overruns, Report
from .planning.step import StepUnderWay
from .planning.treatments import Treatments

# Steps from one that is timed to the next, at least, for the same kind of step: at first; at most, as they become
# twice as many each time that nothing waited for copies, as planned; and where nothing has to move.
_PATIENCE = 4
_MOST_PATIENCE = 16
_PATIENCE_AT_REST = 32
# So many steps that are of no known kind are recorded in a row. After that it is each fourth.
_STRAYS = 8
# Of the step's time: stalls above the prediction by more than this are a reason to plan anew.
_DRIFT = 0.02
# So much of the budget, at least and at most, is left free when steps went above it.
_LEAST_MARGIN = 0.002
_MOST_MARGIN = 0.05
# So much of it is left free for steps whose blocks have other sizes than the recorded ones: at first, and when the
# fullest of them are known.
_RESERVE = 0.0125
_LEAST_RESERVE = 0.005
# Memory between tensors is planned for anew when it has grown by more than this share of what was given.
_GROWN = 0.01
# The last of these that show what the next may take; and so many of the first are all recorded but for their times.
_VARYING = 8
_FIRST_VARYING = 16
_TREATED = frozenset({ForwardBegin, LayerBegin, LayerEnd})
_PLAYED: frozenset[type[OnRequest]] = frozenset({Used, StepBegin, StepEnd, Memory, MoreBlocks, Recomputed, Refused})
_TIMED = _PLAYED | {StepMeasured}
_RECORDED = _TIMED - {Memory} | {ExactMemory}
_WATCHED = _PLAYED - {Memory} | {ExactMemory}
_EASE: dict[Ease, frozenset[type[OnRequest]]] = {
    Ease.NONE: _PLAYED,
    Ease.QUIET: _PLAYED - {Memory} | {LayerMemory},
    Ease.CALM: _PLAYED - {Memory, Used} | {LayerMemory},
    Ease.RESTING: _PLAYED - {Memory, Used} | {LayerMemory},
}


class PlannedPolicy(Policy):
    """Keeps all of the device's memory below `budget`, with as little waiting as a plan can find.

    The first step runs under LRUPolicy, is recorded, and measured. From then on each step plays a plan made from
    the record: which blocks leave, before which event each is released, and at which it is reloaded. Steps of
    other lengths have plans of their own, scaled from the same record; one with other events is recorded too.
    Where a step does not go as planned, what is leaving is released early, and then the blocks leave that are used
    last: that costs time and keeps the budget.

    Once a step is measured, `decide` raises BudgetTooSmall where no plan can keep the budget. While it is not
    `alone` it goes on with the least that the step can be run in.

    Args:
        budget: Bytes of the device for everything, an int or a string such as "60GiB".
        link: The rates of copies.
        fragments: The bytes that lie unused in torch's pool between tensors, which have room in `beyond`, or else
            in the budget. When a step has been recorded it is what that step had at its fullest and half of
            `fragments`, but at least `fragments` and at most a quarter of the budget. Where a step has more of it,
            blocks leave earlier. None: the budget is for what is allocated.
        slowdown: A step may be longer by this share of its compute time, if that saves memory. None uses the
            budget.
        host_bytes: The bytes that the host tier holds, or a function that says how many these are now. With a link
            that has a drive, spills and fetches are planned too.
        margin: Bytes of the budget that are used only where a step needs them. After each step above the budget it
            is more by what that was above it, and at least 0.2 % of the budget; up to 5 %.
        recompute: Layers may be computed again, where that is faster than to move what they save.
        try_all: Each way to treat layers is tried, also where nothing waits.
        beyond: The bytes that the device has beside the budget.

    Attributes:
        states: What is said of optimizer states that may have a part of the budget.
        alone: Nobody else is to hear of a budget that is too small before this policy raises the error.

    Raises:
        ValueError: A size is below 1 byte, or slowdown is below 0.
        TypeError: slowdown is no number.
    """

    def __init__(
        self,
        budget: int | str,
        link: Link,
        *,
        fragments: int | None = None,
        slowdown: float | None = None,
        host_bytes: int | str | Callable[[], int | None] | None = None,
        margin: int = 0,
        recompute: bool = True,
        try_all: bool = False,
        beyond: int = 0,
    ) -> None:
        instance("link", link, Link)
        whole_number("fragments", 0 if fragments is None else fragments, at_least=0)
        whole_number("margin", margin, at_least=0)
        if slowdown is not None:
            number("slowdown", slowdown, at_least=0)
        self._given = parse_bytes(budget, "budget")
        self._fragments, self._beyond = fragments, beyond
        self._budget = self._limit = self._given - max(0, (fragments or 0) - beyond)
        if self._budget < 1:
            raise ValueError(f"of {format_bytes(self._given)} nothing is left beside fragments")
        if isinstance(host_bytes, type):
            raise TypeError(f"host_bytes must be a size or a function, not the class {host_bytes.__name__}")
        if host_bytes is not None and not callable(host_bytes):
            host_bytes = parse_bytes(host_bytes, "host_bytes")
        self.states = StatesShare(budget=self._given)
        self.alone = True
        self._shortfall: BudgetTooSmall | None = None
        self._least_margin = margin
        self._repertoire = Repertoire(self._budget, link, host_bytes, slowdown, self.states, margin)
        self._ended: dict[int, StepUnderWay] = {}
        self._treatments = Treatments(self._repertoire, try_all=try_all) if recompute else None
        tried = None if self._treatments is None else self._treatments.tried
        self.account = Account(self._repertoire, self._given, self.states, tried)
        self._player = Player(self._repertoire)
        self._player.limit, self._player.margin = self._limit, margin
        self._player.varying = int(_RESERVE * self._budget)
        self._overruns = Overruns()
        self._overrun_bytes = 0  # by which steps with plans were above the budget
        self._most = 0  # bytes of the device in this step, and of these the blocks; nothing of it while it is below
        self._most_blocks = 0  # the budget
        self._most_through = 0  # the uses by then, if backward was through
        self._without_room = 0  # of the blocks, those that found no room on the host
        self._kept = 0  # of optimizer states, when the step began
        self._settled_then = True  # whether they were settled by then
        self._varying = 0  # steps that had blocks of other sizes than the recorded one
        self._grown: deque[int] = deque(maxlen=_VARYING)  # by how much the last of these were above all before
        self._above: deque[int] = deque(maxlen=_VARYING)  # and above what their plans might take
        self._reserve = 0  # what plans leave free for the next
        self._untimed = 0  # steps since the last that was timed
        self._patience = _PATIENCE
        self._strays = 0  # steps since the last that was of a known kind
        self._asks: Collection[type[OnRequest]] = _RECORDED  # where the step needs all that it gives
        self.asks: Collection[type[OnRequest]] = self._asks
        self.gather_bytes = 1  # each block is told of at once, but where the answers are known

    def follow(self, places: Places[Any]) -> None:
        super().follow(places)
        self._player.places = places

    def lacks(self, nbytes: int) -> int:
        return self._player.lacks(nbytes)

    @property
    def plans_spills(self) -> bool:  # type: ignore[override]
        """Whether what goes to disk follows from the plan of the step that goes on."""
        step = self._player.step
        return step is not None and step.table is not None and step.table.disk is not None

    def report(self) -> Report:
        """What the last plan promises, and what came of it; or why there is none."""
        over = self._overruns
        return replace(self.account.report(), steps_over=over.steps, most_over=over.most)

    def shortfall(self, most: int = 0) -> BudgetTooSmall | None:
        """Why no plan can keep the budget in steps like the first one, as far as that has come. None: one can.

        Args:
            most: The bytes of the device that were taken since the last event, at the fullest.
        """
        step = self._player.step
        if not (self._repertoire or step is None):
            self._see(step, most)
        return self._shortfall

    def _see(self, step: StepUnderWay, most: int = 0) -> None:
        if step.exact and step.recording.regular:
            others = most - self._player.own - self.states.kept
            self._shortfall = self._repertoire.shortfall(step.recording, others, self._given)

    def decide(self, event: Event) -> Sequence[Advice]:
        player = self._player
        if type(event) in POSITIONS:  # nearly all of them
            of_layer: Sequence[OfLayer] = self._treated(event) if type(event) in _TREATED else ()
            answer: Sequence[Advice] = player.answer(event)
            if player.decided:
                self._decided()
            if of_layer:
                answer = [*of_layer, *answer]
            elif type(event) is LayerBegin and not event.backward and (layers := player.sure_layers(event.layer)):
                answer = (Keep(event.layer, layers),)
        else:
            answer = self._note(event)
        self.asks = self._asks if self._asks is not _PLAYED else _EASE[player.ease]
        self.gather_bytes = player.gather
        return answer

    def _treated(self, event: Event) -> Sequence[Recompute]:
        """What a layer that begins is to be computed again for."""
        treatments, step = self._treatments, self._player.step
        if treatments is None or step is None:
            return ()
        if isinstance(event, ForwardBegin):
            treatments.forward(event.num_layers)
        elif isinstance(event, LayerBegin) and not event.backward:
            how = treatments.layer(event, step)
            step.choice = treatments.choice
            if how is not None:
                return (Recompute(event.layer, how),)
        elif isinstance(event, LayerEnd):
            treatments.layer_ended(event)
        return ()

    def _note(self, event: Event) -> Sequence[Action]:
        match event:
            case Memory():
                self._hear(event)
            case StepBegin(step):
                self._begin(step)
            case StepEnd(_, stayed):
                self._end(stayed)
            case StepMeasured(step, seconds, stalls):
                if self._repertoire.rates.see(event.out, event.back, event.both) | self._repertoire.see_host():
                    self._repertoire.replan()
                    self._patience = _PATIENCE
                ended = self._ended.pop(step, None)
                if ended is not None:
                    self.account.measured(ended, event)
                    self._learn(ended, seconds, stalls - event.states)
            case MoreBlocks() if self._player.step is not None:
                self._player.step.passing = True
            case Recomputed() if self._treatments is not None and self._player.step is not None:
                self._treatments.heard(event, self._player.step)
            case Refused(action):
                self._player.refused(action)
            case HostPressure(nbytes):
                return self._player.spill(nbytes)
        return ()

    def _hear(self, memory: Memory) -> None:
        device, peak, reserved = memory.device, memory.peak, memory.reserved
        most = max(peak, memory.acting) if isinstance(memory, ExactMemory) else peak
        if most > self._most:
            self._most = most
            if most > self._given:
                self._most_blocks, self._most_through = self._player.places.resident, self._player.through
                self._without_room = self._player.without_room
        if self._fragments is not None and reserved:
            between = reserved - device + self._fragments // 2
            self._limit = min(self._budget, self._given + self._beyond - between)
        if kept := self.states.kept:
            # What is kept of optimizer states is neither others' memory nor of the activations' budget.
            memory = replace(memory, device=device - kept, peak=peak - kept, reserved=reserved - kept)
        self._player.limit = self._limit - kept
        self._player.hear(memory)

    def _begin(self, number: int) -> None:
        self._end({})  # where nobody said so
        self._most = self._most_blocks = self._without_room = 0
        self._kept, self._settled_then = self.states.kept, self.states.settled
        if self._treatments is not None:
            self._treatments.begin()
        self._player.begin(number, may_rest=self._asks is _PLAYED)

    def _end(self, stayed: Mapping[str, int]) -> None:
        step = self._player.end()
        if step is None:
            return
        step.peak, step.update = self._most, self.states.step_peak
        if step.peak > self._given:
            cause = self._cause(step)
            registered = self.states.registered
            about = stayed, registered, self._without_room
            self._overruns.see(Overrun(step.number, step.peak, self._given, cause, self._most_blocks, *about))
        if self._treatments is not None:
            self._treatments.end(step)
        if self.states.kept != self._kept:
            step.passing = True
            self._repertoire.states_moved()
            self.account.states_moved()
            if self._treatments is not None:
                self._treatments.states_moved()
            self._untimed = self._patience = _PATIENCE
        if self.states.settled and not self._settled_then:
            self._forget(step)
        self._untimed = 0 if StepMeasured in self._asks else self._untimed + 1
        self._strays = self._strays + 1 if step.deviates or self._repertoire.apart(step.variant.more) else 0
        self._ended = {number: ended for number, ended in self._ended.items() if number > step.number - _PATIENCE}
        self._ended[step.number] = step
        self.account.ended(step)
        if not (self.alone or self._repertoire):
            self._see(step)
        if self._player.full_at is not None:
            self._repertoire.found_full(self._player.full_at)
        elif step.table is not None and step.peak > self._budget:
            self._overrun(step.peak)
        if step.varies:
            self._vary(step)
        if self._fragments is not None and step.reserved:
            found = step.reserved - step.allocated + self._fragments // 2
            found = max(0, max(self._fragments, min(found, self._given // 4)) - self._beyond)
            now = self._given - self._budget
            if found != now and ((step.exact and not step.varies) or found > now + self._given * _GROWN):
                self._leave_out(found)
        self._asks = _PLAYED
        if self._untimed >= (_PATIENCE_AT_REST if step.rested else self._patience) - 1:
            self._asks = _TIMED
        elif step.varies and (self._varying <= _FIRST_VARYING or self._untimed == 1):
            self._asks = _WATCHED
        if self._repertoire.rates.doubted and self._patience == _PATIENCE and self._asks is _PLAYED:
            self._asks = _TIMED  # where nothing waits, to know the link better helps nobody
        if not self._repertoire or step.woken or (step.deviates and step.recording.regular and not step.exact):
            self._record(step.number + 1)
        if self._treatments is not None:
            if self._treatments.tries:
                self._asks = _RECORDED
            elif self._treatments.lacks_times and self._asks is _PLAYED:
                self._asks = _TIMED

    def _forget(self, step: StepUnderWay) -> None:
        """Steps have optimizer states on the device from now on where this one, and all before it, had none."""
        step.passing = True
        self._repertoire.forget()
        self._ended.clear()
        self.account.states_moved()
        if self._treatments is not None:
            self._treatments.forget()

    def _decided(self) -> None:
        """It is clear now what the step is."""
        self._player.decided = False
        step = self._player.step
        if step is not None and self._player.strange:
            self._record(step.number)

    def _record(self, step: int) -> None:
        """This step is of no kind that is known."""
        if self._strays <= _STRAYS or step % _PATIENCE == 0:
            self._asks = _RECORDED

    def _leave_out(self, fragments: int) -> None:
        """So many bytes of what was given are not to be used."""
        self._budget = self._limit = max(1, self._given - fragments)
        margin = self._least_margin + min(self._overrun_bytes, int(_MOST_MARGIN * self._budget))
        self._player.limit, self._player.margin = self._limit - self.states.kept, margin
        # A step that varies may have what its plan leaves free for that.
        self._repertoire.replan(self._budget, margin, self._reserve)

    def _vary(self, step: StepUnderWay) -> None:
        """Learns from a step whose blocks had other sizes what such steps take at most, and what to leave free."""
        self._varying += 1
        self._player.varying = 0
        self._above.append(step.peak - self._repertoire.room if step.table is not None else 0)
        if step.exact and step.known is not None and not step.deviates:
            self._grown.append(self._repertoire.grow(step.known, step.variant, step.recording))
        reserve = int(_RESERVE * self._budget)
        if len(self._grown) == _VARYING:
            grown = max(self._grown)
            reserve = min(reserve, max(int(_LEAST_RESERVE * self._budget), grown + max(grown, *self._above)))
        if reserve != self._reserve:
            self._reserve = reserve
            self._leave_out(self._given - self._budget)

    def _cause(self, step: StepUnderWay) -> OverrunCause:
        """Why a step took more than what was given."""
        recording = step.recording
        if step.passing and not self._repertoire:
            return OverrunCause.SMALL
        if not recording.blocks:
            return OverrunCause.NOTHING
        if 0 < self._most_through == recording.uses:
            return OverrunCause.AFTER
        if step.table is not None:
            return OverrunCause.PLANNED
        return OverrunCause.NEW if recording.regular else OverrunCause.UNFINISHED

    def _overrun(self, peak: int) -> None:
        self._overrun_bytes += max(peak - self._budget, int(_LEAST_MARGIN * self._budget))
        self._leave_out(self._given - self._budget)

    def _learn(self, step: StepUnderWay, seconds: Sequence[float], stalls: float) -> None:
        missing = len(step.recording.names) - len(seconds)
        if missing < 0 or step.passing:
            return
        repertoire, recording = self._repertoire, step.recording
        known = step.known
        other = step.longer or repertoire.apart(step.variant.more)
        if known is None or known.stitched or step.deviates or (other and step.exact):
            if step.exact and recording.regular and not repertoire.same(recording, step.choice):
                add = partial(repertoire.add, recording, seconds, known, step.variant, step.choice, step.update)
                try:
                    learnt = add(strict=self.alone or self._shortfall is None)
                except BudgetTooSmall as error:
                    if self._fragments is None or error.floor > self._given:
                        raise
                    self._leave_out(self._given - error.floor)  # it did run
                    learnt = add()
                if self._treatments is not None:
                    self._treatments.learnt(learnt)
                lacks_times = missing or (self._treatments is not None and self._treatments.lacks_times)
                self._asks = _TIMED if lacks_times else _PLAYED
        elif step.table is not None and len(seconds) == len(known.names):
            planned = step.table.plan
            surprise = abs(stalls - planned.waits)
            quiet = max(stalls, planned.waits) <= _DRIFT * planned.seconds and not known.guessed
            self._patience = min(2 * self._patience, _MOST_PATIENCE) if quiet else _PATIENCE
            if known.guessed or surprise > _DRIFT * planned.seconds:
                repertoire.drift(known, step.variant, seconds)

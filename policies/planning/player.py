"""Plays plans: answers the events of steps, and keeps to a budget of the device whatever comes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum
from math import inf

from ..base import (
    Action,
    Dropped,
    Event,
    ExactMemory,
    Fetch,
    HostPressure,
    Memory,
    Offload,
    Release,
    Reload,
    Saved,
    Spill,
    StepEnd,
    Used,
)
from ..lru import LRUPolicy
from .names import Name
from .repertoire import Repertoire
from .rest import Rest
from .script import Repetition, Script
from .step import StepUnderWay
from .table import Table
from .whereabouts import Stage, Whereabouts

_FETCHED_AHEAD = 8
# Of what a step takes, the room beyond that must be at least this part if nobody is to look.
_WIDE = 4


class Ease(Enum):
    """How little a policy has to be told of.

    QUIET: the answer to the next event is known, if no more was allocated meanwhile than the last time.
    RESTING: nothing has to move in what comes next.
    """

    NONE = 0
    QUIET = 1
    RESTING = 2


class Player:
    """Follows one step after another, and answers with what the plan for each has; without one as LRUPolicy does.

    A step is thought about event by event, and what was answered is a script. The next one like it is only compared
    with that, and thought about from where it differs.

    step: the one that goes on. limit: the bytes that it may have on the device, with all else. margin: how much of
    these is left free if the plan can do without. varying: how much more in a step whose blocks have other sizes
    than the recorded ones. decided: whether it has become clear what the step is. strange: that it is of no known
    kind, or longer than any.
    ease: how much it has to be told of next.
    """

    def __init__(self, repertoire: Repertoire) -> None:
        self.step: StepUnderWay | None = None
        self.limit = self.margin = self.varying = 0
        self.decided = self.strange = False
        self.ease = Ease.NONE
        self._repertoire = repertoire
        self._whereabouts = Whereabouts()
        self._memory: Memory | None = None
        self._repetition: Repetition | None = None
        self._rest: Rest | None = None
        self._may_rest = False
        self._lru: LRUPolicy | None = None
        self._missing = 0  # bytes that were too many after the last answer, though all had left that could
        self._beside = 0  # bytes that are expected beside blocks, where there is no plan

    @property
    def room(self) -> int:
        """The bytes to keep to in this step."""
        step, least = self.step, self.limit - self.margin
        if step is None:
            return least
        room = least if step.table is None or step.table.plan.peak <= least else self.limit
        return room - self.varying if step.varies else room

    @property
    def resident(self) -> int:
        """The bytes of blocks that it takes to be on the device."""
        self._catch_up()
        return self._whereabouts.resident

    def lacks(self, nbytes: int) -> int:
        """The bytes that are too many where so many more come that are no blocks. A plan knows of all that come."""
        if self.step is None or self.step.table is not None:
            return self._missing
        return max(self._missing, self._beside + nbytes - self.room)

    @property
    def through(self) -> int:
        """How many uses there were, if backward has used all that the step has saved, and 0 before."""
        self._catch_up()
        if self.step is None:
            return 0
        if self._rest is not None:
            return 0 if self._whereabouts.owns_any else self._rest.recording.uses
        recording = self.step.recording
        return recording.uses if 0 < len(recording.blocks) <= recording.uses else 0

    def begin(self, number: int, *, may_rest: bool = False) -> None:
        self._whereabouts.begin_step()
        self.step = StepUnderWay(number)
        self._may_rest = may_rest

    def end(self) -> StepUnderWay | None:
        """The step that has ended, if there was one."""
        step, repetition = self.step, self._repetition
        if step is None:
            return None
        recording = None if step.table is None else step.table.recording
        if self._rest is not None:
            if self._memory is not None:
                self._rest.goes_on(StepEnd(step.number), self._memory)
            self._catch_up()
            step.end_rest(self._rest)
            self._rest = None
        elif repetition is not None and recording is not None and repetition.empty:
            if self._memory is not None:
                step.hear(self._memory, 0)
            step.repeated(repetition, recording)
            for key in repetition.keys:
                self._whereabouts.drop(key)
            self._repetition = None
        else:
            self._depart()
            if step.table is not None and step.transcript is not None and not step.deviates:
                ends_empty = not self._whereabouts.owns_any
                step.table.script = Script(step.transcript.lines, ends_empty)
                step.table.recording = step.recording
        self.step = step.transcript = None
        self.ease = Ease.NONE
        return step

    def hear(self, memory: Memory) -> None:
        """Comes before each event."""
        if type(memory) is ExactMemory:
            self._depart()
        self._memory = memory
        if self._repetition is None and self._rest is None and self.step is not None:
            self.step.hear(memory, self._whereabouts.own)

    def refused(self, action: Action) -> None:
        self._depart(for_good=True)
        self._whereabouts.refused(action)
        if self.step is not None and type(action) is Reload:
            self.step.returning.appendleft(action.key)

    def answer(self, event: Event) -> Sequence[Action]:
        """An event of a step, or one between steps."""
        memory, repetition = self._memory, self._repetition
        if self._rest is not None:
            if self._rest.goes_on(event, memory):
                self._memory = None
                return ()
            self._depart()
        elif repetition is not None:
            answer = repetition.answer(event, memory, self.room)
            if answer is not None:
                self._memory = None
                self.ease = Ease.QUIET if repetition.quiet else Ease.NONE
                return answer
            memory = repetition.memory_at(event) if memory is None else memory
            self._depart()
        self._memory = None
        step = self.step
        name, others, again = self._note(event, memory)
        if step is None:
            return self._think(event, name, others, again)
        own, step.spare = self._whereabouts.own, inf
        answer = self._think(event, name, others, again)
        self._repetition = step.write(event, own, memory, self.room, answer)
        if self._repetition is not None and self._may_rest and memory is not None:
            self._rest_from(step, memory)
        return answer

    def _rest_from(self, step: StepUnderWay, memory: Memory) -> None:
        """Rests for the remainder of a step that nothing has to leave, where that is not near to a limit."""
        table = step.table
        if table is None or table.plan.release or table.recording is None or step.varies:
            return
        if step.known is None or step.known.guessed:
            return
        spare = self.room - table.plan.peak
        if spare * _WIDE >= table.plan.peak - table.recording.standing[0]:
            self._repetition, self.ease = None, Ease.RESTING
            self._rest = Rest(table.recording, table.plan.peak + spare // 2, memory)

    def spill(self, nbytes: int) -> list[Action]:
        """Sends so many bytes of the host on to disk."""
        self._depart(for_good=True)
        if self._lru is not None:
            return self._whereabouts.follow(self._lru.decide(HostPressure(nbytes)))
        step, whereabouts = self.step, self._whereabouts
        on_host = list(whereabouts.at(Stage.HOST))
        if step is not None and step.table is not None:
            place = step.table.place
            names = step.names
            on_host.sort(key=lambda key: place(names.block(key)), reverse=True)
        actions: list[Action] = []
        for key in (*on_host, *whereabouts.at(Stage.LEAVING)):
            if nbytes <= 0:
                break
            nbytes -= whereabouts.nbytes(key)
            actions += whereabouts.follow([Release(key), Spill(key)])
        return actions

    def _note(self, event: Event, memory: Memory | None) -> tuple[Name | None, int | None, Sequence[int]]:
        """The name of an event, the bytes beside blocks, and the blocks that are saved again and were leaving."""
        whereabouts = self._whereabouts
        again: Sequence[int] = ()
        if isinstance(event, Saved):
            again = whereabouts.save(event.blocks)
        elif isinstance(event, Dropped):
            for key in event.keys:
                whereabouts.drop(key)
        others = None if memory is None else memory.device - whereabouts.own
        return None if self.step is None else self.step.take(event, others), others, again

    def _think(self, event: Event, name: Name | None, others: int | None, again: Sequence[int]) -> list[Action]:
        step, whereabouts = self.step, self._whereabouts
        # What is used now comes before all that is only due.
        actions: list[Action] = []
        if isinstance(event, Used):
            if whereabouts.place(event.key) not in (Stage.LEAVING, Stage.SINKING):
                actions = whereabouts.follow([Reload(event.key)])
            whereabouts.use(event.key)
        if step is not None and step.undecided:
            self._choose(step)
        if step is None or step.table is None or name is None:
            advice: Sequence[Action] = self._learning(others).decide(event)
            actions += whereabouts.follow(advice if step is None else step.as_far_as_loose(advice))
            if others is None:
                return actions
            # What comes next is not known, and may be twice as much as any that came before.
            self._beside = others + (0 if step is None else 2 * step.rise)
            return actions + self._guard(self._beside, event)
        advice = step.table.actions(name, step.names)
        if advice or again:
            advice = [*map(Offload, again), *advice]
            actions += whereabouts.follow([each for each in advice if type(each) is not Reload])
            step.returning += [each.key for each in advice if type(each) is Reload]
        if others is not None:
            actions += self._guard(step.table.beside(name, others), event)
        if step.returning:
            actions += self._bring_back(step, step.table, name, others or 0)
        return actions

    def _bring_back(self, step: StepUnderWay, table: Table, event: Name, others: int) -> list[Action]:
        """Reloads what is due, as far as there is room for it; the rest waits for a later event."""
        whereabouts, names = self._whereabouts, step.names
        actions: list[Action] = []
        while step.returning:
            key = step.returning[0]
            block = names.block(key)
            if whereabouts.place(key) in (Stage.HOST, Stage.DISK):
                own = whereabouts.own + whereabouts.nbytes(key)
                spare = self.room - table.needed(event, block, own, others)
                step.spare = min(step.spare, spare)
                if spare < 0:
                    break
            step.returning.popleft()
            unplanned = table.disk is None and whereabouts.any_at(Stage.DISK)
            coming = table.following(block, _FETCHED_AHEAD) if unplanned else ()
            fetched = [Fetch(other) for each in coming if (other := names.key(each)) is not None]
            actions += whereabouts.follow([Reload(key), *fetched])
        return actions

    def _guard(self, beside: int, event: Event) -> list[Action]:
        """Keeps the budget until the next event, at which others take so many bytes beside the step's blocks."""
        step = self.step
        over = self._whereabouts.own + beside - self.room
        if step is not None:
            step.spare = min(step.spare, -over)
        self._missing = 0
        if over <= 0:
            return []
        in_use = {event.key} if isinstance(event, Used) else set()
        before = self._whereabouts.resident
        actions = self._whereabouts.free(over, in_use if step is None else in_use.union(step.in_use, step.held))
        self._missing = max(0, over - before + self._whereabouts.resident)
        return actions

    def _learning(self, others: int | None) -> LRUPolicy:
        """What decides where there is no plan."""
        if self._lru is None:
            self._lru = LRUPolicy(max(1, (self.room - (others or 0)) // 2))
        return self._lru

    def _choose(self, step: StepUnderWay) -> None:
        """Finds the plan for a step, by what it has done so far."""
        found = self._repertoire.find(step.recording.course, step.sizes, step.recording.standing[0])
        if found is not None and step.sizes:
            step.play(*found, self._repertoire.table(*found))
            self._lru = None
        self.decided = found is None or bool(step.sizes)
        self.strange = found is None or step.longer

    def _catch_up(self) -> None:
        """Takes note of what went by a script."""
        step, repetition, whereabouts = self.step, self._repetition, self._whereabouts
        if self._rest is not None:
            self._rest.catch_up(whereabouts)
        if step is None or repetition is None:
            return
        for memory, event, actions in repetition.unnoted():
            step.hear(memory, whereabouts.own)
            self._note(event, memory)
            if isinstance(event, Used):
                whereabouts.use(event.key)
            whereabouts.follow(actions)

    def _depart(self, *, for_good: bool = False) -> None:
        """The step does not go by its script any more. for_good: nor can what it does now be one."""
        step, repetition = self.step, self._repetition
        if step is None:
            return
        self._catch_up()
        self.ease = Ease.NONE
        if self._rest is not None:
            self._rest = None
            step.wake()
        if repetition is not None:
            step.transcript = repetition.transcript()
            step.returning = deque(repetition.waiting())
            if self._memory is not None:
                step.hear(self._memory, self._whereabouts.own)
            self._repetition = None
        if for_good:
            step.transcript = None

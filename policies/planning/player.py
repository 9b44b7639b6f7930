"""Plays plans: answers the events of steps, and keeps to a budget of the device whatever comes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from enum import Enum
from math import inf
from typing import Any

from ..actions import Action, Fetch, Offload, Release, Reload, Spill, after
from ..base import (
    GATHERED_BYTES,
    Dropped,
    Event,
    ExactMemory,
    HostPressure,
    LayerBegin,
    Memory,
    Saved,
    StepEnd,
    Used,
)
from ..lru import LRUPolicy
from ..places import ON_DEVICE, Place, Placed, Places
from .recording import Name
from .repertoire import COMPARED, TRIED, Repertoire
from .script import Repetition, Script
from .step import Rest, StepUnderWay
from .table import Table

_FETCHED_AHEAD = 8
_COMING = Reload, Fetch
_OF_BLOCKS = Saved, Dropped
# Of what a step takes, the room beyond that must be at least this part if nobody is to look; and if what its layers
# save cannot leave any more, whatever comes.
_WIDE = 4
_AMPLE = 2


class Ease(Enum):
    """How little a policy has to be told of.

    QUIET: the answer to the next event is known, if no more was allocated meanwhile than the last time.
    CALM: the same, and nothing is answered to the uses that come next.
    RESTING: nothing has to move in what comes next.
    """

    NONE = 0
    QUIET = 1
    CALM = 2
    RESTING = 3


class Player:
    """Follows one step after another, and answers with what the plan for each has; without one as LRUPolicy does.

    A step is thought about event by event, and what was answered is a script. The next one like it is only compared
    with that, and thought about from where it differs.

    places: where the blocks are. step: the one that goes on. limit: the bytes that it may have on the device, with
    all else. margin: how much of these is left free if the plan can do without. varying: how much more in a step
    whose blocks have other sizes than the recorded ones. decided: whether it has become clear what the step is.
    strange: that it is of no known kind, or longer than any, or began with another amount of memory taken.
    ease: how much it has to be told of next. gather: the bytes of blocks that may be told together then.
    full_at: the most bytes that were away in this step when there was no room for more of them; None: there was.
    """

    def __init__(self, repertoire: Repertoire) -> None:
        self.places: Places[Any] = Places()
        self.step: StepUnderWay | None = None
        self.limit = self.margin = self.varying = 0
        self.decided = self.strange = False
        self.ease, self.gather = Ease.NONE, 1
        self._repertoire = repertoire
        self._earlier: list[Placed] = []  # blocks of earlier steps
        self._own_then = 0  # the bytes of this step's blocks on the device, when the last answer is done
        self._memory: Memory | None = None
        self._repetition: Repetition | None = None
        self._rest: Rest | None = None
        self._may_rest = False
        self._lru: LRUPolicy | None = None
        self._missing = 0  # bytes that were too many after the last answer, though all had left that could
        self._coming = 0  # bytes beside blocks that a layer needs which is computed again
        self._beside = 0  # bytes that are expected beside blocks, where there is no plan
        self._without_room: dict[int, None] = {}  # blocks that the host had no room for
        self._tried: int | None = None  # one of them, if it was to leave once more in the last answer
        self.full_at: int | None = None

    @property
    def without_room(self) -> int:
        """The bytes of the blocks that the host had no room for."""
        return sum(block.nbytes for block in map(self.places.find, self._without_room) if block is not None)

    @property
    def room(self) -> int:
        """The bytes to keep to in this step."""
        step, least = self.step, self.limit - self.margin
        if step is None:
            return least
        if step.table is None and step.like is not None:
            return least - least // TRIED
        room = least if step.table is None or step.table.plan.peak <= least else self.limit
        return room - self.varying if step.varies else room

    @property
    def own(self) -> int:
        """The bytes on the device of the blocks that the step has saved."""
        if not self._earlier:
            return self.places.resident
        return self.places.resident - sum(each.nbytes for each in self._earlier if each.place in ON_DEVICE)

    @property
    def owns_any(self) -> bool:
        """Whether blocks of the step are alive."""
        self._earlier = [block for block in self._earlier if block.place is not Place.GONE]
        return len(self.places.by_key) > len(self._earlier)

    def lacks(self, nbytes: int) -> int:
        """The bytes that are too many where so many more come that are no blocks. A plan knows of all that come."""
        if self.step is None or self.step.table is not None:
            return self._missing
        return max(self._missing, self._beside + nbytes - self.room)

    @property
    def through(self) -> int:
        """How many uses there were, if backward has used all that the step has saved, and 0 before."""
        self._catch_up()
        if self._rest is not None:
            return 0 if self.owns_any else self._rest.recording.uses
        recording = None if self.step is None else self.step.recording
        return recording.uses if recording is not None and 0 < len(recording.blocks) <= recording.uses else 0

    def begin(self, number: int, *, may_rest: bool = False) -> None:
        self._earlier = [*self.places.by_key.values()]
        self._own_then = self._coming = 0
        self.step, self.full_at = StepUnderWay(number), None
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
            step.end_rest(self._rest)
            self._rest = None
        elif repetition is not None and recording is not None and repetition.empty:
            if self._memory is not None:
                step.hear(self._memory, 0)
            step.repeated(repetition, recording)
            self._repetition = None
        else:
            self._depart()
            if step.table is not None and step.transcript is not None and not step.deviates:
                step.table.script = Script(step.transcript.lines, ends_empty=not self.owns_any)
                step.table.recording = step.recording
        self.step = step.transcript = None
        self.ease, self.gather = Ease.NONE, 1
        return step

    def hear(self, memory: Memory) -> None:
        """Comes before each event."""
        if type(memory) is ExactMemory:
            self._depart()
        self._memory = memory
        if self._repetition is None and self._rest is None and self.step is not None:
            self.step.hear(memory, self._own_then)

    def refused(self, action: Action) -> None:
        self._depart(for_good=True)
        self._own_then = self.own
        if type(action) is Offload:
            self._without_room[action.key] = None
            self.full_at = max(self.full_at or 0, self.places.away)
        if self.step is not None and type(action) is Reload:
            self.step.returning.appendleft(action.key)

    def answer(self, event: Event, following: Sequence[Event] | None = None) -> Sequence[Action]:
        """An event of a step, or one between steps. It may be several that were told as one.

        following: what has happened by now, too, where it is one of those.
        """
        memory, repetition = self._memory, self._repetition
        if self._rest is not None:
            if self._rest.goes_on(event, memory):
                self._memory = None
                return ()
            self._depart()
        elif repetition is not None:
            answer = None
            if following is None and isinstance(event, _OF_BLOCKS):
                answer = repetition.answer_together(event, self.room) if memory is None else None
                if answer is None and len(events := repetition.apart(event)) > 1:
                    return self._answer_each(events)
            if answer is None:
                answer = repetition.answer(event, memory, self.room)
            if answer is not None:
                self._memory = None
                self.ease = Ease.QUIET if repetition.quiet else Ease.NONE
                self.gather = 1
                if (together := repetition.together) is not None and self._may_rest:
                    self.ease = Ease.CALM if together.uses else Ease.QUIET
                    self.gather = together.nbytes
                return answer
            memory = repetition.memory_at([event, *(following or ())]) if memory is None else memory
            self._depart()
        self._memory = None
        step = self.step
        own = self.own
        others = None if memory is None else memory.device - own
        shadow = Shadow(self.places, own)
        if step is None:
            return self._think(event, None, others, shadow)
        step.spare = step.lack = inf
        answer = self._think(event, step.take(event, others), others, shadow)
        self._own_then = shadow.own
        self._repetition = step.write(event, (own, shadow.own), memory, self.room, answer)
        if self._repetition is not None and self._may_rest and memory is not None:
            self._rest_from(step, memory)
        return answer

    def _answer_each(self, events: Sequence[Event]) -> Sequence[Action]:
        """Events that were told as one."""
        memory, self._memory = self._memory, None
        answer: list[Action] = []
        for number, event in enumerate(events, start=1):
            if number == len(events) and memory is not None:
                self.hear(memory)
            answer += self.answer(event, events[number:])
        return answer

    def _rest_from(self, step: StepUnderWay, memory: Memory) -> None:
        """Rests for the remainder of a step that nothing has to leave, where that is not near to a limit."""
        table = step.table
        if table is None or table.plan.release or table.recording is None or step.varies:
            return
        if step.known is None or step.known.guessed:
            return
        spare, taken = self.room - table.plan.peak, table.plan.peak - table.recording.standing[0]
        if spare * _WIDE >= taken:
            self._repetition, self.ease, self.gather = None, Ease.RESTING, GATHERED_BYTES
            layer = table.layer_bytes if spare * _AMPLE >= taken else 0
            self._rest = Rest(table.recording, table.plan.peak + spare // 2, memory, layer)

    def sure_layers(self, layer: int) -> int:
        """So many of the layers that begin now, this one first, need not save blocks. Those of a forward's first
        layer do: by them the manager knows that it waits for its backward."""
        return self._rest.sure_layers() if layer and self._rest is not None else 0

    def spill(self, nbytes: int) -> list[Action]:
        """Sends so many bytes of the host on to disk."""
        self._depart(for_good=True)
        step, shadow = self.step, Shadow(self.places, self.own)
        actions: list[Action] = []
        if self._lru is not None:
            # It takes its last answer for done, and does not know of what left to keep the budget.
            actions = shadow.follow(self._lru.decide(HostPressure(nbytes)))
            nbytes -= sum(self.places.by_key[each.key].nbytes for each in actions if type(each) is Spill)
        on_host = shadow.at(Place.HOST)
        if step is not None and step.table is not None:
            on_host.sort(key=step.use, reverse=True)
        for key in (*on_host, *shadow.at(Place.LEAVING)):
            if nbytes <= 0:
                break
            nbytes -= self.places.by_key[key].nbytes
            actions += shadow.follow([Release(key), Spill(key)])
        return actions

    def _think(self, event: Event, name: Name | None, others: int | None, shadow: Shadow) -> list[Action]:
        """The answer to an event, whose name is known within a step. others: the bytes beside the step's blocks."""
        used_now: list[Action] = []
        if isinstance(event, Used) and shadow.place(event.key) is not Place.LEAVING:
            used_now = shadow.follow([Reload(event.key)])
        actions = self._due(event, name, others, shadow)
        # What is used now comes before all that is only due, and after all that makes room. What would come and
        # leave at once stays away.
        last = {action.key: type(action) for action in actions}
        going = [action for action in actions if type(action) not in _COMING]
        coming = [action for action in actions if type(action) in _COMING and last[action.key] in _COMING]
        return going + used_now + coming

    def _due(self, event: Event, name: Name | None, others: int | None, shadow: Shadow) -> list[Action]:
        """What is to be done at an event beside what it asks for."""
        step = self.step
        actions: list[Action] = []
        if step is not None and step.undecided:
            self._choose(step)
        if step is None or step.table is None or name is None:
            advice: Sequence[Action] = self._learning(others).decide(event)
            if step is not None and step.like is not None:
                # There has to be room for what comes at once when a layer is computed again.
                advice = [each for each in advice if type(each) is not Reload]
            actions += shadow.follow(advice if step is None else step.as_far_as_loose(advice))
            if others is None:
                return actions
            self._beside = self._expected(event, name, others)
            return actions + self._guard(self._beside, event, shadow)
        if advice := step.table.actions(name, step.names):
            actions += shadow.follow([each for each in advice if type(each) is not Reload])
            step.bring_back(each.key for each in advice if type(each) is Reload)
        if others is None:  # it is one of several that were told together, and the first has made room for all
            return actions
        if step.table.knows(name) or step.planned is None:
            step.planned = name, others
        actions += self._guard(max(others, step.table.beside(*step.planned)), event, shadow)
        if step.returning:
            actions += self._bring_back(step, step.table, step.planned, others, shadow)
        return actions

    def _expected(self, event: Event, name: Name | None, others: int) -> int:
        """The bytes beside blocks until the next event, in a step without a plan. others: those that are there."""
        step = self.step
        if step is None:
            return others
        if isinstance(event, LayerBegin):
            self._coming = others + step.again.get(event.layer, lambda: 0)() if event.backward else 0
        if step.like is not None and name is not None:
            return max(step.like.beside(name, others), self._coming)
        # What comes next is not known, and may be twice as much as any that came before.
        return max(others + 2 * step.rise, self._coming)

    def _bring_back(
        self, step: StepUnderWay, table: Table, planned: tuple[Name, int], others: int, shadow: Shadow
    ) -> list[Action]:
        """Reloads what is due, as far as there is room for it; the rest waits for a later event.

        planned: the step's last event that the plan has, and the bytes beside blocks then. others: those now.
        """
        names = step.names
        actions: list[Action] = []
        while step.returning:
            key = step.returning[0]
            block = names.block(key)
            if shadow.place(key) in (Place.HOST, Place.DISK):
                own = shadow.own + self.places.by_key[key].nbytes
                spare = self.room - max(own + others, table.needed(*planned, block, own))
                if spare < 0:
                    step.lack = -spare
                    break
                step.spare = min(step.spare, spare)
            step.returning.popleft()
            coming = table.following(block, planned[0], _FETCHED_AHEAD) if table.disk is None else ()
            below = self.places.on_disk([other for each in coming if (other := names.key(each)) is not None])
            actions += shadow.follow([Reload(key), *map(Fetch, below)])
        return actions

    def _guard(self, beside: int, event: Event, shadow: Shadow) -> list[Action]:
        """Frees blocks so that the budget holds until the next event.

        beside: the bytes of the device that are no blocks of the step until then.
        """
        step = self.step
        over = shadow.own + beside - self.room
        if step is not None:
            step.spare = min(step.spare, -over)
        self._missing = 0
        if over <= 0:
            return []
        in_use = {event.key} if isinstance(event, Used) else set()
        before = shadow.resident
        if step is not None:
            in_use = in_use.union(step.in_use, step.held)
        again = self._again()
        in_use = in_use.union(self._without_room)
        if step is not None and step.on_course:
            actions = shadow.free(over, in_use, step.use)
            sent = [each.key for each in actions if type(each) is Offload]
            step.bring_back(key for key in sent if step.use(key) < inf)
        else:
            actions = shadow.free(over, in_use)
        self._missing = max(0, over - before + shadow.resident)
        if again is not None and shadow.place(again) is Place.DEVICE:
            self._without_room[again] = None  # it need not leave
        else:
            self._tried = again
        return actions

    def _again(self) -> int | None:
        """One of the blocks that the host had no room for, which may leave now. The others follow if that can: to
        try all at each event takes longer than all else there.
        """
        if self._tried is not None and self._tried not in self._without_room:
            self._without_room.clear()
        self._tried = None
        while self._without_room:
            del self._without_room[key := next(iter(self._without_room))]
            if self.places.find(key) is not None:
                return key
        return None

    def _learning(self, others: int | None) -> LRUPolicy:
        """What decides where there is no plan."""
        if self._lru is None:
            self._lru = LRUPolicy(max(1, (self.room - (others or 0)) // 2))
        return self._lru

    def _choose(self, step: StepUnderWay) -> None:
        """Finds the plan for a step, by what it has done so far."""
        found = self._repertoire.find(step.recording.course, step.sizes, step.recording.standing[0], step.choice)
        if found is not None and step.sizes:
            step.play(*found, self._repertoire.table(*found))
            step.compared = 1 if self._repertoire.alone(found[0]) else COMPARED
            self._lru = None
        self.decided = found is None or bool(step.sizes)
        self.strange = found is None or step.longer or self._repertoire.apart(step.variant.more)

    def _catch_up(self) -> None:
        """Takes note of what went by a script."""
        step, repetition = self.step, self._repetition
        if step is None or repetition is None:
            return
        for memory, event, own, own_then in repetition.unnoted():
            step.hear(memory, self._own_then)
            step.take(event, memory.device - own)
            self._own_then = own_then

    def _depart(self, *, for_good: bool = False) -> None:
        """The step does not go by its script any more. for_good: nor can what it does now be one."""
        step, repetition = self.step, self._repetition
        if step is None:
            return
        self._catch_up()
        self.ease, self.gather = Ease.NONE, 1
        if self._rest is not None:
            self._rest = None
            step.wake()
        if repetition is not None:
            step.transcript = repetition.transcript()
            step.returning = deque(repetition.waiting())
            if self._memory is not None:
                step.hear(self._memory, self._own_then)
            self._repetition = None
        if for_good:
            step.transcript = None


class Shadow:
    """The places of blocks, with what the actions of an answer change that is not done yet.

    own: the bytes on the device of the blocks of the step that goes on. resident: of all blocks.
    """

    def __init__(self, places: Places[Any], own: int) -> None:
        self._places = places
        self._changed: dict[int, tuple[Place, bool]] = {}
        self.own = own
        self.resident: int = places.resident

    def place(self, key: int) -> Place | None:
        """None for a block that is gone."""
        block = self._places.find(key)
        return None if block is None else self._now(block)[0]

    def follow(self, actions: Sequence[Action]) -> list[Action]:
        """Those of the actions that can be done where the blocks are then."""
        done = []
        for action in actions:
            block = self._places.find(action.key)
            if block is None:
                continue
            before, sinking = self._now(block)
            changed = after(type(action), before, sinking)
            if changed is not None:
                self._changed[action.key] = changed
                change = block.nbytes * ((changed[0] in ON_DEVICE) - (before in ON_DEVICE))
                self.own += change
                self.resident += change
                done.append(action)
        return done

    def free(self, nbytes: int, keep: Collection[int], use: Callable[[int], float] | None = None) -> list[Action]:
        """Gives up so many bytes of the device, if there are as many, beside those to keep.

        What is leaving goes first, in the order of its saves. Of the rest it is what is used last, as far as `use`
        says when a block is used, and else what was saved first.
        """
        actions: list[Action] = []
        for place in (Place.LEAVING, Place.DEVICE):
            blocks = list(self._places.by_key.values())
            if use is not None and place is Place.DEVICE:
                blocks.sort(key=lambda block: use(block.key), reverse=True)
            for block in blocks:
                if nbytes <= 0:
                    return actions
                if block.key not in keep and not block.stuck and self._now(block)[0] is place:
                    nbytes -= block.nbytes
                    actions += self.follow([Offload(block.key), Release(block.key)])
        return actions

    def at(self, place: Place) -> list[int]:
        """The keys of the blocks there that do not go on to disk, in the order of their saving."""
        now = ((key, self._now(block)) for key, block in self._places.by_key.items())
        return [key for key, (there, sinking) in now if there is place and not sinking]

    def _now(self, block: Placed) -> tuple[Place, bool]:
        return self._changed.get(block.key, (block.place, block.sinking))

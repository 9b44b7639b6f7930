"""How the layers of steps are treated: each way is tried and measured, and then the best is chosen for each."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

from ..actions import How
from ..base import LayerBegin, LayerEnd, Recomputed
from .choosing import choose
from .profile import BudgetTooSmall
from .repertoire import TRIED, Known, Repertoire, Variant
from .step import StepUnderWay
from .stitching import Backward, Choice, RecordedStep, Way, Ways
from .treated import Tried

_log = logging.getLogger("tiered_mem.policies")

# Of a step's time: what the layers may be computed again for, at least.
WORTH = 0.005
# And what another choice has to save, once there is one.
_BETTER = 0.02
# A choice is made again where a rate, a size or a time is another by this share, and not before so many steps.
_CHANGED = 0.05
_PATIENCE = 16
# So often a choice is made again since steps took other times.
_CORRECTIONS = 3
# So many steps are tried in one way, or as was chosen, of which none could be planned for.
_TRIES = 4
# Each once more where what "full" has shown lets more layers find room for that: what "cheap" keeps, and how far
# memory rises in layers like them.
_WAYS: tuple[How, ...] = ("cheap", "full", "cheap", "full")


class Treatments:
    """Says how each layer of a step is treated.

    Steps keep all until one of them is known, and its plan makes the device wait. Then all layers are treated in
    one way, and next in the other: first in trials, in which the manager looks what comes out the same, and then in
    a step that is recorded. Any mixture of these can be planned for, and the best is what later steps do. Steps
    that are shorter, and need not wait, keep all.

    try_all: the ways are tried also where a plan need not wait, so that they are known for other budgets.
    choice: how the layers of this step are treated. tries: whether the next step has to be recorded.
    """

    def __init__(self, repertoire: Repertoire, *, try_all: bool = False) -> None:
        self._repertoire = repertoire
        self._try_all = try_all
        self._courses: dict[int, _Course] = {}
        self._course: _Course | None = None
        self._last: _Course | None = None  # of the last step that has ended
        self._inputs: int | None = None
        self._asked: set[int] = set()
        self._treated: set[int] = set()
        self._trials: set[int] = set()
        self.choice: Choice = {}

    def forget(self) -> None:
        """No step that comes is like those that are known."""
        self._courses.clear()
        self._course = self._last = None

    @property
    def tries(self) -> bool:
        return any(course.trying is not None or course.stitched for course in self._courses.values())

    def tried(self) -> Tried:
        """What is known by now for steps like the last."""
        course = self._last
        if course is None or course.plain is None:
            return Tried(None, self.tries, False)
        undecided = course.trying is not None or course.stitched or course.plain.guessed or not any(course.basis)
        return Tried(course.measured() if course.done else None, self.tries, undecided)

    @property
    def lacks_times(self) -> bool:
        """Whether the next step had better be timed: by the first one of all nothing can be chosen."""
        return any(course.plain is not None and course.plain.guessed for course in self._courses.values())

    def states_moved(self) -> None:
        """Optimizer states are elsewhere now."""
        for course in self._courses.values():
            course.moved = True

    def begin(self) -> None:
        """A step begins."""
        self.choice, self._course, self._inputs = {}, None, None
        self._asked, self._treated, self._trials = set(), set(), set()

    def forward(self, num_layers: int) -> None:
        """A forward begins. The first of a step tells by its layers what is to be done in it."""
        self._course = self._course or self._courses.setdefault(num_layers, _Course())

    def layer(self, event: LayerBegin, step: StepUnderWay) -> How | None:
        """The forward of a layer begins. How it is to be computed again, if it is."""
        course = self._course
        if course is not None:
            if self._inputs is None:
                self._inputs = event.inputs
                self.choice = self._choice_for(course, event.inputs)
                if course.plain is not None and course.trying is not None:
                    step.like = self._repertoire.table(course.plain, Variant(1.0, course.more))
            course.called[event.layer] = max(event.inputs, course.called.get(event.layer, 0))
        if event.layer in self.choice:
            self._asked.add(event.layer)
        return self.choice.get(event.layer)

    def layer_ended(self, event: LayerEnd) -> None:
        """The forward of a layer has ended."""
        if (course := self._course) is not None:
            course.held[event.layer] = max(event.unsaved_inputs, course.held.get(event.layer, 0))

    def heard(self, event: Recomputed, step: StepUnderWay) -> None:
        """A layer is treated as it was to be, or has a trial of that."""
        if self._course is not None:
            how = self.choice.get(event.layer)
            if event.trial and how == "full":
                self._course.results[event.layer] = event.results, event.unsaved
            if how is not None and event.layer in self._course.backwards:
                step.again[event.layer] = partial(self._course.coming, event.layer, how, trial=event.trial)
        (self._trials if event.trial else self._treated).add(event.layer)

    def end(self, step: StepUnderWay) -> None:
        """The step is over."""
        course = self._course
        if course is None:
            return
        self._last = course
        if step.recording.split:
            course.once, course.plain = True, None
            course.forget()
        if step.known is course.plain and step.variant.ratio == 1:
            course.more = step.variant.more
        if self._trials:
            step.passing = True
            if course.trying is not None:
                course.look_at(step, self._trials)
                course.layers[course.trying] = self._with_room(course, course.trying)
        elif course.trying is not None and self._asked and self.choice == course.all(course.trying):
            course.tries += 1
            if not self._treated or course.tries > _TRIES:
                self._next(course)
        elif self._asked != self._treated and self.choice:
            course.forget()  # something is not computed again any more
        if course.trying is None and course.plain is not None and not course.plain.guessed:
            self._consider(course, step.number)

    def learnt(self, known: Known | None) -> None:
        """A step that was begun as this one was has been recorded. None if no plan for it keeps the budget."""
        course = self._course
        if course is None or self._inputs is None or course.once:
            return
        if known is None:
            if course.trying is not None and self.choice:
                self._next(course)
            elif self.choice == course.choice:
                course.tries += 1
                course.stitched &= course.tries <= _TRIES
        elif not known.choice:
            if course.plain is None or course.inputs != self._inputs:
                course.forget()
            elif known.standing < course.plain.standing and not (course.moved and course.plain.guessed):
                return  # what is chosen has to do for the fullest
            course.plain, course.inputs, course.more, course.moved = known, self._inputs, 0, False
            course.backwards = _recorded(known, Variant()).backwards()
        elif course.trying is not None and known.choice == course.all(course.trying) and not self._trials:
            ratio = course.inputs / max(1, self._inputs)
            course.ways[course.trying] = known, ratio, frozenset(self._treated)
            if course.trying == "full" and ratio == 1:
                rises = _recorded(known, Variant()).rises()
                course.rises = {layer: rise for layer, rise in rises.items() if rise and layer in self._treated}
            self._next(course)
        elif known.choice == course.choice:
            course.stitched = False

    def _with_room(self, course: _Course, how: How) -> list[int]:
        """The layers that can be tried: the device has room while they are computed again.

        What finds no room below stays on the device meanwhile. Where a step takes more than the budget by that
        already, it is to take no more than it does.
        """
        repertoire = self._repertoire
        below = inf if repertoire.link.room is None else repertoire.link.room
        full = course.more + (0 if course.plain is None else max(course.plain.profile.full))
        room = max(repertoire.room - repertoire.room // TRIED - repertoire.states.planned, full - below)
        spare = room + below - full  # for what trials keep beside what the layers save
        found = []
        for layer, backward in sorted(course.backwards.items()):
            trial = layer not in course.kept
            least = max(backward.standing, backward.full - below)
            if how == "cheap" and trial:
                spare -= course.results.get(layer, (backward.saved, 0))[0]
            shown = how == "full" and course.shows(layer) is not None
            most = max(room, repertoire.most - repertoire.states.planned) if shown else room
            if spare >= 0 and least + course.more + course.coming(layer, how, trial=trial) <= most:
                found.append(layer)
        return found

    def _choice_for(self, course: _Course, inputs: int) -> Choice:
        plain = course.plain
        if plain is None or not course.inputs or not inputs:
            return {}
        ratio = inputs / course.inputs
        if course.trying is not None:
            return course.all(course.trying) if ratio > 0.5 else {}
        if not course.choice or ratio >= 1:
            return course.choice
        return {} if self._waits_little(plain, self._repertoire.nearby(ratio, course.more)) else course.choice

    def _waits_little(self, plain: Known, variant: Variant) -> bool:
        return self._repertoire.waits(plain, variant) <= WORTH * plain.profile.compute * variant.ratio

    def _consider(self, course: _Course, number: int) -> None:
        """Begins to try other ways, or chooses again, where there is a reason."""
        plain = course.plain
        if course.done and self._took_other_times(course):
            self._choose(course, _BETTER)
        if plain is None or course.number + _PATIENCE > number:
            return
        basis = self._basis(course)
        before = course.basis or (0.0,) * len(basis)
        changed = [abs(new - old) > _CHANGED * old for new, old in zip(basis, before, strict=True)]
        if not any(changed):
            return
        if course.done:
            course.corrections = 0
            self._choose(course, _BETTER)
            course.number = number
        elif changed[-1] and any(course.basis) and not course.doubted:
            # The ways are compared with its times, which are measured before.
            course.doubted = plain.guessed = True
        elif self._try_all or not self._waits_little(plain, Variant(1.0, course.more)):
            course.number = number
            course.doubted = False
            course.left = [*_WAYS]
            self._next(course)
        else:
            course.basis, course.doubted = basis, False

    def _basis(self, course: _Course) -> tuple[float, ...]:
        """What decides how layers are treated best."""
        return *self._repertoire.basis, 0.0 if course.plain is None else course.plain.profile.compute

    def _took_other_times(self, course: _Course) -> bool:
        """Whether steps take other times than what was chosen by, as where they wait for other ranks no more that
        tried their ways at that time. Those count from now on."""
        known = self._repertoire.recorded(course.choice)
        if known is None or course.moved or course.corrections >= _CORRECTIONS:
            return False
        if abs(known.profile.compute - course.expected) <= _BETTER * course.expected:
            return False
        course.corrections += 1
        course.shown = _recorded(known, Variant()), course.choice
        return True

    def _next(self, course: _Course) -> None:
        """Goes on to the first way, or to the one after what was tried. What was is known now, or cannot be."""
        course.kept.clear()
        course.trying, course.tries = None, 0
        while course.left and course.trying is None:
            how = course.left.pop(0)
            before = course.layers.get(how, [])
            course.layers[how] = sorted({*before, *self._with_room(course, how)})
            if len(course.layers[how]) > len(before):
                course.trying = how
        # What states have of the budget is room for trials, and is shared out anew after them.
        self._repertoire.states.target = None if course.trying is None else 0
        if course.trying is None:
            course.done = True
            self._choose(course, WORTH)

    def _choose(self, course: _Course, better: float) -> None:
        ways = course.measured()
        course.basis = self._basis(course)
        if ways is None:
            return
        course.expected = ways.stitched(course.choice).profile.compute
        repertoire = self._repertoire
        try:
            layers = sorted({layer for *_, treated in course.ways.values() for layer in treated})
            room, link, states = repertoire.room, repertoire.link, repertoire.states
            chosen = choose(ways, room, link, states, layers, course.choice, most=repertoire.most)
        except BudgetTooSmall as error:
            _log.info("layers are treated as before: %s", str(error))
            return
        if chosen.seconds > (1 - better) * chosen.before or chosen.choice == course.choice:
            return
        step = ways.stitched(chosen.choice)
        course.choice, course.expected, course.tries = chosen.choice, step.profile.compute, 0
        course.stitched = bool(chosen.choice) and repertoire.stitch(step, chosen.choice)


@dataclass
class _Course:
    """What is known of the steps that begin with a forward of so many layers.

    once: no layer may be computed again, as backward comes to layers more than once: a checkpoint keeps what each
    time has computed as long as the graph is there.
    moved: optimizer states have, since the plain step was recorded. Others may be as full.
    plain: one that keeps all. more: the bytes that are taken before it by now, and were not when it was recorded.
    inputs: the bytes that its first layer is called with.
    called: those that each layer was called with, at most. held: of these what is kept only where the layer is
    computed again, as it does not save it.
    backwards: of its layers. layers: for each way those that can be tried in it. ways: the steps in which all
    of these were to be treated so, how much longer the plain one is, and which of them were.
    kept: of each layer that had a trial in the way that is tried now, the bytes of the blocks that it had then.
    results: of each that had one as "full", what "cheap" would keep, and at most beside what it saves.
    rises: of each that was computed again "full", how far memory rose in its backward.
    trying: what is tried now. left: what is to be tried after it. tries: the steps since then without a trial, or
    since a choice those that no plan could be made for.
    doubted: the times of the plain step are other ones by now, and so it is measured once more.
    done: all ways were tried. expected: the seconds of a step, without waits for copies, as it was chosen. shown: a
    step that took other ones, and how its layers were treated. corrections: how often that was a reason to choose.
    choice: what was chosen. stitched: no step was recorded that has it. basis, number: of the choice, the rates,
    sizes and time that it was made for, and the step.
    """

    once: bool = False
    moved: bool = False
    plain: Known | None = None
    more: int = 0
    inputs: int = 0
    called: dict[int, int] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)
    backwards: dict[int, Backward] = field(default_factory=dict)
    layers: dict[How, list[int]] = field(default_factory=dict)
    kept: dict[int, int] = field(default_factory=dict)
    ways: dict[How, tuple[Known, float, frozenset[int]]] = field(default_factory=dict)
    results: dict[int, tuple[int, int]] = field(default_factory=dict)
    rises: dict[int, int] = field(default_factory=dict)
    trying: How | None = None
    left: list[How] = field(default_factory=list)
    tries: int = 0
    doubted: bool = False
    done: bool = False
    expected: float = 0.0
    shown: tuple[RecordedStep, Choice] | None = None
    corrections: int = 0
    choice: Choice = field(default_factory=dict)
    stitched: bool = False
    basis: tuple[float, ...] = ()
    number: int = -_PATIENCE

    def all(self, how: How) -> Choice:
        return dict.fromkeys(self.layers[how], how)

    def coming(self, layer: int, how: How, *, trial: bool) -> int:
        """The bytes of the device that come while a layer is computed again, at most.

        As "cheap" it also has the results that it is given. Before one like it had a trial nothing is known of
        these: they are taken for as much as it saves.
        """
        backward = self.backwards[layer]
        inputs, held = self.called.get(layer, 0), self.held.get(layer, 0)
        if how == "full":
            rise = self.shows(layer)
            less = 0 if rise is None else backward.forward - rise
            return backward.coming(inputs - less, held, trial=trial)
        alike = [n for n, each in self.backwards.items() if each.saved == backward.saved]
        kept = [max(0, self.kept[n] - backward.saved - self.held.get(n, 0)) for n in alike if n in self.kept]
        known = [self.results[n] for n in alike if n in self.results]
        beside = min(max(each, default=backward.saved) for each in (kept, [unsaved for _, unsaved in known]))
        stays = max((results - unsaved for results, unsaved in known), default=inf)
        return backward.coming(inputs, held, trial=trial, beside=beside, stays=stays)

    def shows(self, layer: int) -> int | None:
        """How far memory rose, at most, in the backward of layers like it that were computed again "full".

        It is less than in their forward, as what comes after the last that they save is not computed again. None:
        there were none.
        """
        new, inputs = self.backwards[layer], self.called.get(layer, 0)
        like = []
        for n in self.rises.keys() & self.backwards.keys():
            old = self.backwards[n]
            if old.saved == new.saved and old.forward >= new.forward and self.called.get(n, 0) == inputs:
                like.append(self.rises[n])
        return max(like, default=None)

    def look_at(self, step: StepUnderWay, trials: Collection[int]) -> None:
        """Learns from a step what the layers keep that have their trials in it."""
        kept: dict[tuple[int, int], int] = {}
        for (graph, layer, _), life in step.recording.blocks.items():
            if layer in trials:
                kept[graph, layer] = kept.get((graph, layer), 0) + life.nbytes
        for (_, layer), nbytes in kept.items():
            self.kept[layer] = max(nbytes, self.kept.get(layer, 0))

    def forget(self) -> None:
        """All but the step that keeps all."""
        self.ways.clear()
        self.kept.clear()
        self.results.clear()
        self.rises.clear()
        self.layers.clear()
        self.trying, self.tries, self.done = None, 0, False
        self.expected, self.shown, self.corrections = 0.0, None, 0
        self.choice, self.stitched, self.basis = {}, False, ()

    def measured(self) -> Ways | None:
        """What can be chosen from; None where there is nothing."""
        if self.plain is None:
            return None
        steps: dict[Way, RecordedStep] = {None: _recorded(self.plain, Variant(1.0, self.more))}
        for how, (known, ratio, treated) in self.ways.items():
            step = replace(_recorded(known, Variant(ratio)), treated=treated)
            if step.layers == steps[None].layers:
                steps[how] = step
            else:
                _log.info("layers are not treated as %r: they begin in another order then", how)
        if len(steps) == 1:
            return None
        return Ways(steps) if self.shown is None else Ways(steps).as_measured(*self.shown)


def _recorded(known: Known, variant: Variant) -> RecordedStep:
    profile = known.profile if variant == Variant() else known.profile.scaled(*variant)
    return RecordedStep(known.names, known.blocks, profile, frozenset(known.choice))

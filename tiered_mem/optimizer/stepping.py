"""How steps are made bucket by bucket."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from functools import partial

import torch

from ..errors import InterruptedStep, TieredMemError
from .backward_watch import BackwardWatch
from .bucket import Bucket, fetch_ahead
from .gradient_hooks import Hearing
from .layout import Param
from .partial_step import PartialStep
from .pipeline import Pipeline
from .resting import StatePlace
from .separable import StepChoice


class Stepping:
    """Makes the steps of one optimizer bucket by bucket, in step() alone.

    open: the step of which a part has been made. broken: makes the error of whoever comes after one that ended in
    the middle, or during a save. last_first: buckets are wanted in the order in which backward comes to them.
    lock: whoever calls has it. place: where the optimizer looks for its states; set before all else. overlap: as in
    `TieringManager.register_optimizer`.
    """

    overlap: str | None = None
    last_first = False
    place: StatePlace

    def __init__(self, optimizer: torch.optim.Optimizer, choice: StepChoice, pipeline: Pipeline) -> None:
        self._optimizer = optimizer
        self._choice = choice
        self._pipeline = pipeline
        self._name = type(optimizer).__name__
        self._watch: BackwardWatch | None = None
        self.lock = threading.RLock()
        self.open: OpenStep | None = None
        self.broken: Callable[[], TieredMemError] | None = None

    def asked(self, owner: object, *, at_once: bool) -> Stepping:
        """step() begins. at_once: the step cannot be in parts. owner: lives until all of it has been made.

        Returns what makes this step and those after it, which is this as a rule.

        Raises OverlapRefused where it cannot be what it is without an overlap, and InterruptedStep, where a part is
        done.
        """
        return self

    def step(self) -> None:
        """Steps all that has not been stepped. Raises InterruptedStep where it ends in the middle."""
        self._choice.check_gradients()
        with self.place.used(), self.stepping() as step:
            step.rest()
        self.open = None

    def whole(self, what: str) -> None:
        """`what` is to be done with states of which none are in the middle of a step.

        Raises OverlapRefused where that cannot be, and InterruptedStep.
        """

    def finish(self) -> None:
        """What of a step is still to come is made now."""

    @property
    def coming(self) -> Collection[Bucket]:
        """The buckets that are to be stepped, in this order."""
        return self._pipeline.buckets

    def no_step(self) -> None:
        """The gradients go, and there is no step to come with them. Raises OverlapRefused where a part is done."""
        self._pipeline.drop()

    def refuse_scaler(self) -> None:
        """A scaler is about to divide gradients. Raises OverlapRefused where they are used before."""

    def last_backward(self) -> None:
        """The next backward is the last one before the step."""

    def gradient(self, param: Param) -> None:
        """A gradient has come. In a thread of backward's."""

    def begin_anew(self) -> None:
        """The step that was begun, if any, is of no matter."""
        self.open = None

    @property
    def beside(self) -> str | None:
        """What the ways of states are made beside: "forward", "backward", or nothing."""
        return self.overlap

    @property
    def settled(self) -> bool:
        """Whether steps are made as they will be from now on, as far as is known."""
        return True

    def learn(self, params: Iterable[Param], hearing: Hearing) -> None:
        """A step is over. params: that the next one may have gradients for. hearing: is not kept alive."""
        if self._watch is None:
            self._watch = BackwardWatch(hearing.near_end)
        self._watch.step_ends(params)

    def close(self) -> None:
        """There are no more steps."""
        if self._watch is not None:
            self._watch.close()

    @contextlib.contextmanager
    def stepping(self) -> Iterator[OpenStep]:
        """The step that is open, or begins. What ends inside of it with an error goes no further."""
        self.open = step = self.open or OpenStep(self._optimizer, self._pipeline)
        before = step.begun
        try:
            yield step
        except BaseException as error:
            if step.begun == before:
                self.open = step if before else None  # nothing has changed, and it may go on
                raise
            self.open = None
            self.broken = step.interrupted
            if isinstance(error, Exception):
                raise self.broken() from error
            raise

    def interrupt(self, step: OpenStep, why: str) -> InterruptedStep:
        """The error for a step that cannot go on. So is each one after it."""
        self.open = None
        self.broken = partial(step.interrupted, why)
        return step.interrupted(why)


class OpenStep:
    """Steps buckets through a pipeline, in any order, and some of a bucket's parameters at a time.

    stepped: the parameters that have been. begun: how many of the buckets have changed, or may have. done: how many
    of them whole.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, pipeline: Pipeline) -> None:
        pipeline.residences.step_begins()
        self._name = type(optimizer).__name__
        self._pipeline = pipeline
        self._partial = PartialStep(optimizer)
        self.stepped: set[Param] = set()
        self.begun = self.done = 0

    def take(
        self,
        bucket: Bucket,
        params: Sequence[Param],
        changing: Set[Param],
        following: Collection[tuple[Bucket, Set[Param]]],
    ) -> None:
        """Steps parameters of one bucket.

        params: those that the optimizer is to look at. changing: those of them that have a gradient. following:
        what may come to the device meanwhile.
        """

        def step(bucket: Bucket) -> None:
            self._pipeline.residences.poll()
            self.begun += bool(changing)
            # What has no gradient and came along early is not taken back, and so not to be changed.
            away = {param for param in bucket.states if bucket.away([param]) or param not in changing}
            here = {param: state for param, state in bucket.states.items() if param not in away}
            bucket.states.update(self._partial.step(params, here, away))
            self.stepped |= changing
            self.done += bool(changing)

        self._pipeline.one(bucket, changing, step, following)

    def rest(self) -> None:
        """Steps all that has not been stepped yet."""
        left: list[Bucket] = []
        changing: dict[Bucket, set[Param]] = {}
        for bucket in self._pipeline.buckets:
            changing[bucket] = {p for p in bucket.params if p.grad is not None and p not in self.stepped}
            if changing[bucket] or self.stepped.isdisjoint(bucket.params):
                left.append(bucket)
        with self._pipeline.only([bucket for bucket in left if changing[bucket]]):
            for index, bucket in enumerate(left):
                following = left[index + 1 :]
                fetch_ahead(following, changing)
                params = [param for param in bucket.params if param not in self.stepped]
                self.take(bucket, params, changing[bucket], [(each, changing[each]) for each in following[:1]])

    def changed(self) -> str | None:
        """The name of a value of a group that somebody has changed since the last bucket."""
        return self._partial.changed()

    def interrupted(self, why: str = "") -> InterruptedStep:
        """The error for a step that goes no further. why: in words."""
        return InterruptedStep(self._name, self.done, len(self._pipeline.buckets), why=why)

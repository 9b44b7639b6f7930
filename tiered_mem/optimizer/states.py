"""The states of one optimizer, in buckets."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from ..device import Device
from ..errors import Closed, InterruptedStep
from ..fixed_slots import Exclusive
from ..interrupts import interruptible, uninterrupted
from ..transfer import TransferEngine
from .backward_watch import BackwardWatch
from .bucket import Bucket, pack
from .bucket_mover import BucketMover
from .layout import Layout, Movable, layout_of
from .own_tensors import OwnTensors
from .partial_step import Param, PartialStep, State, bare_step
from .pipeline import AHEAD, Pipeline
from .residence import Residences
from .snapshot import on_cpu, with_tensors
from .step_choice import StepChoice
from .trial import Trial
from .whole import Whole

_log = logging.getLogger("tiered_mem.optimizer")

P = ParamSpec("P")
R = TypeVar("R")


def _alone(method: Callable[Concatenate[States, P], R]) -> Callable[Concatenate[States, P], R]:
    """One thread at a time: those of backward come here, too."""

    @uninterrupted
    @functools.wraps(method)
    def alone(self: States, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            return method(self, *args, **kwargs)

    return alone


class States:
    """The states of one optimizer. Between steps they rest in `residences`, or stay on the device until `offload`.

    None are here before `adopt`.

    bucket_bytes: half of the device memory that states pass through in a step, a parameter aside whose state is
    larger. A bucket has at most half as much, so that one can come and one leave while one is stepped.
    stay: they stay on the device until `offload`, and are there again after `reload`.
    separable: the optimizer may be stepped bucket by bucket, and is tried out unless that is known of it. False is
    at once, with all states on the device; None is at once unless it is known.

    at_once: whether it is stepped at once. closure_first: whether a step calls a closure once, before all else.
    version: another one whenever states have changed.

    Raises NeedsAll for an optimizer that cannot be stepped bucket by bucket.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device: Device,
        engine: TransferEngine,
        exclusive: Exclusive,
        residences: Residences,
        *,
        bucket_bytes: int,
        stay: bool,
        separable: bool | None,
    ) -> None:
        self._lock = threading.RLock()
        self._optimizer = optimizer
        self._device = device
        self._residences = residences
        self._bucket_bytes = bucket_bytes
        self._stay = stay
        self._away = not stay
        self._choice = StepChoice(optimizer, separable)
        self.at_once = self._choice.at_once
        self.closure_first = self._choice.closure_first
        known = not self._choice.in_order
        self._movable = OwnTensors(device) if self.at_once and not known else Movable(device)
        self._trial = Trial(optimizer, self._movable)
        self._choice.check(self._trial)
        self._pipeline = Pipeline(device, engine, exclusive, self._movable)
        self._mover = BucketMover(device, engine, exclusive, residences, self._movable)
        self._pack = partial(pack, limit=bucket_bytes // 2, in_order=self._choice.in_order)
        self._whole = Whole(optimizer, self._mover, self._movable, self._pack)
        self.buckets: list[Bucket] = []
        self._known: set[Param] = set()
        self._broken: Callable[[], InterruptedStep] | None = None
        self.version = 0
        self._closed = False
        prefetch = weakref.WeakMethod(self._prefetch)
        self._watch = BackwardWatch(lambda: None if (call := prefetch()) is None else call())

    @_alone
    def adopt(self) -> None:
        """Takes over the parameters of the optimizer's groups that are new, and their states if they have any.

        Raises TierFull, torch.OutOfMemoryError, and whatever the disk does; the optimizer has its states then as
        before, and all that was taken is given back.
        """
        self._not_inside("have new parameters")
        self.version += 1
        self._whole.look()
        self._choice.look_at_groups()
        state = self._optimizer.state
        layouts: dict[Param, Layout] = {}
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                if param not in self._known and param not in layouts:
                    layouts[param] = self._layout_of(param, group)
        before = dict(state)
        buckets = self._pack(layouts.items())
        try:
            self._mover.settle_down(buckets)
            for bucket in buckets:
                for param in bucket.params:
                    if isinstance(state.get(param), dict):
                        # Other dictionaries with the same tensors: those from before are there to go back to.
                        bucket.states[param] = with_tensors(state.pop(param), lambda tensor: tensor)
            self.give_up_prefetch()
            if self._away:
                self._mover.send_away(buckets)
                self._residences.progress()
        except BaseException:
            for bucket in buckets:
                if bucket.residence is not None:
                    bucket.residence.release()
            state.clear()
            state.update(before)
            raise
        self._known.update(layouts)
        self.buckets += buckets
        if self._away:
            self._learn()

    def _layout_of(self, param: Param, group: State) -> Layout:
        state = self._optimizer.state.get(param)
        if not param.requires_grad or isinstance(state, dict):
            return layout_of(param, state if isinstance(state, dict) else {}, self._movable)
        try:
            return self._trial.layout_of(param, group)
        except ValueError as error:
            _log.debug("what states it makes is seen in the first step: %s", str(error))
            return Layout((), 0)

    @_alone
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step of the optimizer, and what that returns where it is made at once.

        closure: is the optimizer's to call, which makes the step at once.

        Raises InterruptedStep if it ends in the middle, and at every call after that. A step at once raises what
        the optimizer alone does, and leaves the same behind.
        """
        self.check()
        if not self._whole.here:
            self._adopt_unknown()
        in_place = self._whole.here or not self._away
        if in_place or closure is not None or self._choice.at_once_now(self.buckets):
            with self.present():
                return bare_step(self._optimizer)(*([] if closure is None else [_interruptible(closure)]))
        self._step_by_bucket()
        return None

    @contextlib.contextmanager
    @uninterrupted
    def present(self) -> Iterator[None]:
        """Inside, all states are on the device, in the optimizer's `state`, and may be changed there.

        Raises torch.OutOfMemoryError, and what the residences raise, before anything is changed.
        """
        with self._lock:
            self.check()
            if self._whole.here:
                yield
                return
            self._adopt_unknown()
            self._pipeline.give_up()
            self._whole.bring(self.buckets)
            self._residences.step_begins()
            self.version += 1
            try:
                yield
            finally:
                self.version += 1
                if not self._closed:
                    self.buckets = self._whole.take_over(self.buckets, away=self._away)
            if self._away:
                self.progress()
                self._learn()

    def _step_by_bucket(self) -> None:
        self._choice.check_gradients(self._trial)
        self._residences.step_begins()
        self.version += 1
        step_of = PartialStep(self._optimizer)
        changing: dict[Bucket, set[Param]] = {
            bucket: {param for param in bucket.params if param.grad is not None} for bucket in self.buckets
        }
        begun = stepped = 0

        def step(bucket: Bucket) -> bool:
            nonlocal begun, stepped
            self._residences.progress()
            begun += bool(changing[bucket])
            # What has no gradient and came along early is not taken back, and so not to be changed.
            away = {param for param in bucket.states if bucket.away([param]) or param not in changing[bucket]}
            here = {param: state for param, state in bucket.states.items() if param not in away}
            bucket.states.update(step_of.step(bucket.params, here, away))
            stepped += bool(changing[bucket])
            return bucket.fits(self._movable)

        try:
            self._pipeline.run(self.buckets, changing, step, self._replace, self._window_bytes())
        except BaseException as error:
            if not begun:
                raise
            self._broken = partial(InterruptedStep, self._name, stepped, len(self.buckets))
            if isinstance(error, Exception):
                raise self._broken() from error
            raise
        self.progress()
        self._learn()

    def _learn(self) -> None:
        if not self.at_once:
            self._watch.step_ends(self._known)

    def progress(self) -> None:
        """Goes on with files: writes what can be written by now, and reads what the next step begins with.

        Does not wait.
        """
        if not self._lock.acquire(blocking=False):
            return  # whoever has it goes on as well
        try:
            self._residences.progress()
            if self._broken is None and not self._closed:
                for bucket in self.buckets[:AHEAD]:
                    if bucket.residence is not None and bucket.away():
                        bucket.residence.fetch()
        finally:
            self._lock.release()

    @_alone
    def settle(self) -> None:
        """Waits until every file is written."""
        self._residences.settle()

    @_alone
    def give_up_prefetch(self) -> None:
        """There is no step to come after all."""
        self._pipeline.give_up()

    @_alone
    def offload(self) -> None:
        """Everything leaves the device, and has left it when this returns. Does nothing where that is so anyway.

        Raises what `step` does; TierFull leaves what is on the device there.
        """
        self.check()
        self._not_inside("be offloaded")
        self._pipeline.give_up()
        self._away = True
        self._mover.send_away(self.buckets)

    @_alone
    def reload(self) -> None:
        """Everything is on the device again, if it stays there. All or nothing: raises torch.OutOfMemoryError."""
        self.check()
        self._not_inside("be reloaded")
        if not self._stay:
            return
        self._mover.bring_back(self.buckets)
        self._away = False

    @_alone
    def snapshot(self) -> dict[Any, Any]:
        """Copies of all states by parameter, and of what else the optimizer keeps, in pageable memory."""
        self.check()
        self._pipeline.give_up()  # what has come early for the next step
        whole: dict[Any, Any] = {key: on_cpu(value) for key, value in self._optimizer.state.items()}
        for bucket in self.buckets:
            whole |= self._copies(bucket)
        return whole

    def _copies(self, bucket: Bucket) -> dict[Param, State]:
        cpu = bucket.residence.copy_out() if bucket.residence is not None and bucket.away() else None
        return {param: bucket.copies(param, cpu) for param in bucket.params if param in bucket.states}

    def keys(self) -> list[Any]:
        """What has a state: parameters, for the most part."""
        return [*self._optimizer.state, *(param for bucket in self.buckets for param in bucket.states)]

    @_alone
    def copies_with(self, key: Any) -> dict[Any, State]:
        """The states of the bucket that a parameter is in, as in `snapshot`; its own is empty if it has none."""
        self.check()
        self._pipeline.give_up()
        for bucket in self.buckets:
            if key in bucket.states:
                return self._copies(bucket)
        return {key: on_cpu(self._optimizer.state.get(key, {}))}

    @_alone
    def load(self, load: Callable[[Sequence[Param]], None], at_once: bool) -> None:
        """Replaces all states. Afterwards a step that was interrupted is of no matter any more.

        load: has the optimizer load the states of some parameters, which it puts on the device, and whatever
        belongs to no parameter. at_once: it is called once for all parameters, and otherwise for each bucket, after
        a call for none.

        Raises what `load` does. If that has changed nothing, all states are as before; otherwise check() says so.
        """
        if self._closed:
            self.check()
        self._not_inside("be loaded")
        self._pipeline.give_up()
        self._adopt_unknown()
        at_once = at_once or self.at_once
        before = self._optimizer.state
        loaded = 0
        try:
            load([param for bucket in self.buckets for param in bucket.params] if at_once else [])
            others = {key: value for key, value in self._optimizer.state.items() if key not in self._known}
            if self.at_once:
                self._renew_all()
            else:
                for bucket in self.buckets:
                    if not at_once:
                        load(bucket.params)
                    self._renew(bucket)
                    loaded += 1
        except BaseException:
            if self._optimizer.state is not before:
                self._broken = partial(InterruptedStep, self._name, loaded, len(self.buckets), loading=True)
            raise
        self._optimizer.state.clear()
        self._optimizer.state.update(others)
        self._choice.look_at_groups()
        self._broken = None

    def _renew_all(self) -> None:
        self.version += 1
        for bucket in self.buckets:
            bucket.forget_flat()
        self.buckets = self._whole.take_over(self.buckets, away=self._away)

    def _renew(self, bucket: Bucket) -> None:
        """Takes over the states that the optimizer has now of the parameters of a bucket."""
        self.version += 1
        bucket.forget_flat()
        state = self._optimizer.state
        bucket.states = {param: state.pop(param) for param in bucket.params if param in state}
        if not bucket.fits(self._movable):
            self._replace(bucket)
        elif self._away:
            self._mover.send_away([bucket])

    def _adopt_unknown(self) -> None:
        if any(param not in self._known for group in self._optimizer.param_groups for param in group["params"]):
            self.adopt()

    def check(self) -> None:
        """Raises Closed or InterruptedStep where the states cannot be used."""
        if self._closed:
            raise Closed(
                "the manager is closed, and with it the states of the optimizer are gone: take state_dict() before"
            )
        if self._broken is not None:
            raise self._broken()

    @_alone
    def close(self) -> None:
        """Gives back all memory. The states are gone."""
        self._closed = True
        self.version += 1
        self._watch.close()
        self._pipeline.give_up()
        for bucket in self.buckets:
            if bucket.residence is not None:
                bucket.residence.release()
            bucket.states.clear()
        self._residences.close()

    @property
    def _name(self) -> str:
        return type(self._optimizer).__name__

    @property
    def nbytes(self) -> int:
        """What all states take that can move."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def step_bytes(self) -> int:
        """The device memory that states take in a step, and not between steps."""
        if not self._away:
            return 0
        return self.nbytes if self.at_once else self._window_bytes()

    @property
    def host_bytes(self) -> int:
        """The host memory that is taken for states, or to stage them on their ways to disk and back."""
        return self._residences.host_bytes

    def _not_inside(self, what: str) -> None:
        if self._whole.here:
            raise RuntimeError(f"the states cannot {what} in the middle of a step, or inside of present()")

    def _prefetch(self) -> None:
        """Brings the first bucket of the next step to the device while backward ends, if the memory is there."""
        if not self._lock.acquire(blocking=False):
            return  # a step is under way, whose closure this backward is of
        try:
            first = next((bucket for bucket in self.buckets if bucket.away()), None)
            if first is None or self._broken is not None or self._closed or self.at_once:
                return
            # Not on top of what backward needs: the peak stays what it is.
            if self._window_bytes() <= self._device.below_peak():
                with contextlib.suppress(torch.OutOfMemoryError):
                    self._pipeline.prefetch(first, self._window_bytes())
        finally:
            self._lock.release()

    def _window_bytes(self) -> int:
        # Room for one that comes, one that is stepped, one that leaves, and for what is lost where the ring ends.
        largest = max((bucket.nbytes for bucket in self.buckets), default=0)
        large = largest if largest > self._bucket_bytes // 2 else 0
        return min(2 * self._bucket_bytes + large, self.nbytes)

    def _replace(self, bucket: Bucket) -> None:
        if self._mover.replace(bucket, self._name) and self._away:
            self._mover.send_away([bucket])


def _interruptible(closure: Callable[[], float]) -> Callable[[], float]:
    """The closure, which may run forwards and backwards for as long as these take."""

    @interruptible
    def call() -> float:
        return closure()

    return call

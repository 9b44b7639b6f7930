"""The states of one optimizer, in buckets."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from ..device import Device
from ..errors import Closed, InterruptedStep
from ..transfer import TransferEngine
from .backward_watch import BackwardWatch
from .bucket import Bucket, pack
from .bucket_mover import BucketMover
from .layout import Layout, layout_of
from .partial_step import Param, PartialStep, State
from .pipeline import AHEAD, Pipeline
from .residence import Exclusive
from .residences import Residences
from .snapshot import on_cpu
from .trial import Trial

P = ParamSpec("P")
R = TypeVar("R")


def _alone(method: Callable[Concatenate[States, P], R]) -> Callable[Concatenate[States, P], R]:
    """One thread at a time: those of backward come here, too."""

    @functools.wraps(method)
    def alone(self: States, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            return method(self, *args, **kwargs)

    return alone


class States:
    """The states of one optimizer. Between steps they rest in `residences`, or stay on the device until `offload`.

    bucket_bytes: half of the device memory that states pass through in a step, a parameter aside whose state is
    larger. A bucket has at most half as much, so that one can come and one leave while one is stepped.
    stay: they stay on the device until `offload`, and are there again after `reload`.

    version: another one whenever states have changed.

    Raises ValueError for an optimizer that cannot be stepped bucket by bucket, and TierFull where there is not
    enough room for all of its states.
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
    ) -> None:
        self._lock = threading.RLock()
        self._optimizer = optimizer
        self._device = device
        self._residences = residences
        self._bucket_bytes = bucket_bytes
        self._stay = stay
        self._away = not stay
        self._pipeline = Pipeline(device, engine, exclusive)
        self._mover = BucketMover(device, engine, exclusive, residences)
        self.buckets: list[Bucket] = []
        self._known: set[Param] = set()
        self._broken: Callable[[], InterruptedStep] | None = None
        self.version = 0
        self._closed = False
        prefetch = weakref.WeakMethod(self._prefetch)
        self._watch = BackwardWatch(lambda: None if (call := prefetch()) is None else call())
        Trial(optimizer, device).check_separable()
        self.adopt()

    @_alone
    def adopt(self) -> None:
        """Takes over the parameters of the optimizer's groups that are new, and their states if they have any.

        Raises TierFull and torch.OutOfMemoryError; the optimizer has its states then as before.
        """
        self.version += 1
        trial = Trial(self._optimizer, self._device)
        layouts: list[tuple[Param, Layout]] = []
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                if param in self._known:
                    continue
                if param in self._optimizer.state or not param.requires_grad:
                    layout = layout_of(param, self._optimizer.state.get(param, {}), self._device)
                else:
                    layout = trial.layout_of(param, group)
                layouts.append((param, layout))
        buckets = pack(layouts, self._bucket_bytes // 2)
        self._mover.settle_down(buckets)
        for bucket in buckets:
            for param in bucket.params:
                if param in self._optimizer.state:
                    bucket.states[param] = self._optimizer.state.pop(param)
            self._known.update(bucket.params)
        self.buckets += buckets
        self.give_up_prefetch()
        if self._away:
            self._mover.send_away(buckets)
            self._residences.progress()
            self._watch.step_ends(self._known)

    @_alone
    def step(self) -> None:
        """One step of the optimizer.

        Raises InterruptedStep if it ends in the middle, and at every call after that.
        """
        self.check()
        self._adopt_unknown()
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
            return bucket.fits(self._device)

        try:
            if self._away:
                self._pipeline.run(self.buckets, changing, step, self._replace, self._window_bytes())
            else:
                begun = 1
                self._step_in_place(step_of)
        except BaseException as error:
            if not begun:
                raise
            self._broken = partial(InterruptedStep, self._name, stepped, len(self.buckets))
            if isinstance(error, Exception):
                raise self._broken() from error
            raise
        if self._away:
            self.progress()
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
        self._pipeline.give_up()
        self._away = True
        self._mover.send_away(self.buckets)

    @_alone
    def reload(self) -> None:
        """Everything is on the device again, if it stays there. All or nothing: raises torch.OutOfMemoryError."""
        self.check()
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
        self._pipeline.give_up()
        self._adopt_unknown()
        before = self._optimizer.state
        loaded = 0
        try:
            load([param for bucket in self.buckets for param in bucket.params] if at_once else [])
            others = {key: value for key, value in self._optimizer.state.items() if key not in self._known}
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
        self._broken = None

    def _renew(self, bucket: Bucket) -> None:
        """Takes over the states that the optimizer has now of the parameters of a bucket."""
        self.version += 1
        bucket.forget_flat()
        state = self._optimizer.state
        bucket.states = {param: state.pop(param) for param in bucket.params if param in state}
        if not bucket.fits(self._device):
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

    def _step_in_place(self, step_of: PartialStep) -> None:
        everything = {param: state for bucket in self.buckets for param, state in bucket.states.items()}
        states = step_of.step([param for bucket in self.buckets for param in bucket.params], everything, ())
        for bucket in self.buckets:
            bucket.states = {param: states[param] for param in bucket.params if param in states}
            if not bucket.fits(self._device):
                self._replace(bucket)

    @_alone
    def _prefetch(self) -> None:
        """Brings the first bucket of the next step to the device while backward ends, if the memory is there."""
        first = next((bucket for bucket in self.buckets if bucket.away()), None)
        if first is None or self._broken is not None or self._closed:
            return
        # Not on top of what backward needs: the peak stays what it is.
        if self._window_bytes() <= self._device.below_peak():
            with contextlib.suppress(torch.OutOfMemoryError):
                self._pipeline.prefetch(first, self._window_bytes())

    def _window_bytes(self) -> int:
        # Room for one that comes, one that is stepped, one that leaves, and for what is lost where the ring ends.
        largest = max((bucket.nbytes for bucket in self.buckets), default=0)
        large = largest if largest > self._bucket_bytes // 2 else 0
        return min(2 * self._bucket_bytes + large, sum(bucket.nbytes for bucket in self.buckets))

    def _replace(self, bucket: Bucket) -> None:
        if self._mover.replace(bucket, self._name) and self._away:
            self._mover.send_away([bucket])

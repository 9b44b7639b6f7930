"""The states of one optimizer, in buckets."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ..device import Device
from ..errors import Closed, InterruptedStep, TierFull
from ..sizes import format_bytes
from ..tiers import DeviceSlot
from ..transfer import TransferEngine
from .backward_watch import BackwardWatch
from .bucket import Bucket, Leaving, pack
from .partial_step import Param, PartialStep, State
from .pipeline import AHEAD, Pipeline
from .residences import Residences
from .snapshot import on_cpu
from .trial import Trial

_log = logging.getLogger("tiered_mem.optimizer")


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
        exclusive: Callable[[], contextlib.AbstractContextManager[None]],
        residences: Residences,
        *,
        bucket_bytes: int,
        stay: bool,
    ) -> None:
        self._optimizer = optimizer
        self._device = device
        self._engine = engine
        self._exclusive = exclusive
        self._residences = residences
        self._bucket_bytes = bucket_bytes
        self._stay = stay
        self._away = not stay
        self._pipeline = Pipeline(device, engine, exclusive)
        self.buckets: list[Bucket] = []
        self._known: set[Param] = set()
        self._broken: Callable[[], InterruptedStep] | None = None
        self.version = 0
        self._closed = False
        prefetch = weakref.WeakMethod(self._prefetch)
        self._watch = BackwardWatch(lambda: None if (call := prefetch()) is None else call())
        Trial(optimizer, device).check_separable()
        self.adopt()

    def adopt(self) -> None:
        """Takes over the parameters of the optimizer's groups that are new, and their states if they have any.

        Raises TierFull and torch.OutOfMemoryError; the optimizer has its states then as before.
        """
        self.version += 1
        trial = Trial(self._optimizer, self._device)
        pairs: list[tuple[Param, State]] = []
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                if param in self._known:
                    continue
                state = self._optimizer.state.get(param)
                if state is None and param.requires_grad:
                    state = trial.state_of(param, group)
                pairs.append((param, state or {}))
        buckets = pack(pairs, self._device, self._bucket_bytes // 2)
        self._settle_down([bucket for bucket in buckets if bucket.nbytes])
        for bucket in buckets:
            for param in bucket.params:
                if param in self._optimizer.state:
                    bucket.states[param] = self._optimizer.state.pop(param)
            self._known.update(bucket.params)
        self.buckets += buckets
        self.give_up_prefetch()
        if self._away:
            self._send_away(buckets)
            self._residences.progress()
            self._watch.step_ends(self._known)

    def step(self) -> None:
        """One step of the optimizer.

        Raises InterruptedStep if it ends in the middle, and at every call after that.
        """
        self.check()
        self._adopt_unknown()
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
            away = {param for param in bucket.states if bucket.away([param])}
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
        self._residences.progress()
        if self._broken is None and not self._closed:
            for bucket in self.buckets[:AHEAD]:
                if bucket.residence is not None and bucket.away():
                    bucket.residence.fetch()

    def settle(self) -> None:
        """Waits until every file is written."""
        self._residences.settle()

    def give_up_prefetch(self) -> None:
        """There is no step to come after all."""
        self._pipeline.give_up()

    def offload(self) -> None:
        """Everything leaves the device, and has left it when this returns. Does nothing where that is so anyway.

        Raises what `step` does; TierFull leaves what is on the device there.
        """
        self.check()
        self._pipeline.give_up()
        self._away = True
        self._send_away(self.buckets)

    def reload(self) -> None:
        """Everything is on the device again, if it stays there. All or nothing: raises torch.OutOfMemoryError."""
        self.check()
        if not self._stay:
            return
        coming = [bucket for bucket in self.buckets if bucket.away()]
        stream = self._device.current_stream()
        flats = {
            bucket: torch.empty(bucket.nbytes, dtype=torch.uint8, device=self._device.torch_device)
            for bucket in coming
        }
        for bucket, flat in flats.items():
            if (residence := bucket.residence) is None:
                continue
            host = residence.take(blank=False)
            with self._exclusive():
                (came,) = self._engine.reload([(host, DeviceSlot(flat, stream), residence.ticket)])
            residence.leave(None, came)
            came.hold(stream)
            bucket.arrive(bucket.params, flat)
        self._away = False

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

    def copies_with(self, key: Any) -> dict[Any, State]:
        """The states of the bucket that a parameter is in, as in `snapshot`; its own is empty if it has none."""
        self.check()
        self._pipeline.give_up()
        for bucket in self.buckets:
            if key in bucket.states:
                return self._copies(bucket)
        return {key: on_cpu(self._optimizer.state.get(key, {}))}

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
            self._send_away([bucket])

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

    def _settle_down(self, buckets: Sequence[Bucket]) -> None:
        residences = self._residences.make([bucket.nbytes for bucket in buckets])
        for bucket, residence in zip(buckets, residences, strict=True):
            bucket.residence = residence

    def _send_away(self, buckets: Sequence[Bucket]) -> None:
        """Copies to the residences what is on the device, and waits for that."""
        stream = self._device.current_stream()
        reading: list[Leaving] = []
        last = None
        for bucket in buckets:
            residence = bucket.residence
            if residence is None or not bucket.here():
                continue
            host = residence.take(blank=not bucket.away())
            leaving = bucket.leave(host, stream, set(bucket.params), self._device)
            with self._exclusive():
                last = self._engine.offload(leaving.moves)
            residence.leave(last)
            reading.append(leaving)
        if last is not None:
            last.event.synchronize()

    def _replace(self, bucket: Bucket) -> None:
        """Finds another residence for a bucket whose states have other tensors by now, or other shapes.

        Where there is no room for them, they stay on the device.
        """
        old, bucket.residence = bucket.residence, None
        if old is not None and bucket.away():
            bucket.arrive(bucket.params, old.copy_out().to(self._device.torch_device))
        bucket.lay_out(self._device)
        if old is not None:
            old.release()
        if bucket.nbytes == 0:
            return
        try:
            self._settle_down([bucket])
        except TierFull as error:
            _log.warning(
                "%s of states of %s have changed their shapes, and stay on the device: %s",
                *(format_bytes(bucket.nbytes), self._name, error),
            )
        else:
            if self._away:
                self._send_away([bucket])

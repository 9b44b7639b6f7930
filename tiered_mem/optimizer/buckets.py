"""The states of one optimizer in buckets, and their steps."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Any

import torch

from ..device.device import Device, Stream
from ..device.transfer import TransferEngine
from ..errors import InterruptedStep, TierFull
from ..sizes import format_bytes
from ..tiers.shelf import Exclusive
from .bucket import Bucket
from .layout import Param, StateLayout, layout_of, with_tensors
from .partial_step import PartialStep
from .pipeline import Pipeline
from .residences import Residences, pack
from .step_choice import StepChoice

_log = logging.getLogger("tiered_mem.optimizer")


class Buckets:
    """The buckets of one optimizer. They are stepped one by one, or all at once where the optimizer has its states.

    Not thread-safe.

    residences: for the buckets. Each has at most half of `bucket_bytes`, so that one can come while one leaves.
    stay: the states stay on the device until `offload`, and are there again after `reload`.
    separable: the optimizer may be stepped bucket by bucket, and is tried out unless that is known of it. False is
    at once, with all states on the device; None is at once unless it is known.

    all: the buckets, none before `adopt`. known: the parameters in them. choice: how steps are made. away: states
    leave the device after a step. here: they are where the optimizer looks for them. broken: makes the error of a
    step that ended in the middle.

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
        stay: bool,
        separable: bool | None,
    ) -> None:
        self._optimizer = optimizer
        self._device = device
        self.residences = residences
        self._stay = stay
        self.choice = StepChoice(optimizer, device, separable)
        self._split = self.choice.split
        self._name = type(optimizer).__name__
        self._pipeline = Pipeline(device, engine, exclusive, self._split)
        self._order: list[Any] = list(optimizer.state)
        self.all: list[Bucket] = []
        self.known: set[Param] = set()
        self.away = not stay
        self.here = False
        self.broken: Callable[[], InterruptedStep] | None = None

    def adopt(self) -> None:
        """Takes over the parameters of the optimizer's groups that are new. See `States.adopt`."""
        self._split.look()
        self.choice.look_at_groups()
        layouts: dict[Param, StateLayout] = {}
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                if param not in self.known and param not in layouts:
                    layouts[param] = self.choice.trial.layout_of(param, group)
        state = self._optimizer.state
        before = dict(state)
        buckets = self._packed(layouts.items())
        try:
            self.residences.house(buckets)
            for bucket in buckets:
                for param in bucket.params:
                    if isinstance(state.get(param), dict):
                        # Other dictionaries with the same tensors: those from before are there to go back to.
                        bucket.states[param] = with_tensors(state.pop(param), lambda tensor: tensor)
            self.drop_prefetch()
            if self.away:
                self._offload(buckets)
                self.residences.poll()
        except BaseException:
            for bucket in buckets:
                bucket.close()
            state.clear()
            state.update(before)
            raise
        self.known.update(layouts)
        self.all += buckets

    def step(self) -> None:
        """Makes a step bucket by bucket. Raises InterruptedStep where it ends in the middle, and sets `broken`."""
        self.choice.check_gradients()
        self.residences.step_begins()
        step_of = PartialStep(self._optimizer)
        changing = {bucket: {param for param in bucket.params if param.grad is not None} for bucket in self.all}
        begun = stepped = 0

        def step(bucket: Bucket) -> bool:
            nonlocal begun, stepped
            self.residences.poll()
            begun += bool(changing[bucket])
            # What has no gradient and came along early is not taken back, and so not to be changed.
            away = {param for param in bucket.states if bucket.away([param]) or param not in changing[bucket]}
            here = {param: state for param, state in bucket.states.items() if param not in away}
            bucket.states.update(step_of.step(bucket.params, here, away))
            stepped += bool(changing[bucket])
            return bucket.fits(self._split)

        try:
            self._pipeline.run(self.all, changing, step, self._replace, self.window_bytes)
        except BaseException as error:
            if not begun:
                raise
            self.broken = partial(InterruptedStep, self._name, stepped, len(self.all))
            if isinstance(error, Exception):
                raise self.broken() from error
            raise

    def bring(self) -> None:
        """Brings all states to the device and into the optimizer's `state`.

        Raises torch.OutOfMemoryError and what the residences raise; then nothing has changed.
        """
        self.drop_prefetch()
        away = [bucket for bucket in self.all if bucket.away()]
        try:
            self._pipeline.reload(away)
        except BaseException:
            for bucket in away:
                bucket.drop_flat()
            raise
        state = self._optimizer.state
        everything = dict(state)
        for bucket in self.all:
            everything |= bucket.states
        state.clear()
        state.update((key, everything[key]) for key in self.in_order(everything))
        self.here = True
        self.residences.step_begins()

    def take_over(self) -> None:
        """Takes all states from the optimizer's `state`; the buckets may be others now.

        What there is no room for stays on the device.
        """
        self.here = False
        state = self._optimizer.state
        self._order = list(state)
        self._split.look()
        renewed: list[Bucket] = []
        for bucket in self.all:
            # What is no dictionary is the optimizer's own business.
            bucket.states = {
                param: state.pop(param) for param in bucket.params if isinstance(state.get(param), dict)
            }
            fits = bucket.fits(self._split, every=self._split.changes)
            renewed += [bucket] if fits else self._repacked(bucket)
        self.all = renewed
        if self.away:
            stream = self._device.current_stream()
            for bucket in renewed:
                if not bucket.stays:
                    self._offload_after_step(bucket, stream)

    def renew_all(self) -> None:
        """Takes all states that have been loaded into the optimizer's `state`, in place of those before."""
        for bucket in self.all:
            bucket.drop_flat()
        self.take_over()

    def renew(self, bucket: Bucket) -> None:
        """As `renew_all` for the parameters of one bucket, which has them and no others then."""
        bucket.drop_flat()
        state = self._optimizer.state
        bucket.states = {param: state.pop(param) for param in bucket.params if param in state}
        if not bucket.fits(self._split):
            self._replace(bucket)
        elif self.away:
            self._offload([bucket])

    def offload(self) -> None:
        """Everything leaves the device, and has left it when this returns. Raises what the residences raise."""
        self.drop_prefetch()
        self.away = True
        self._offload(self.all)

    def reload(self) -> None:
        """Everything is on the device again, if it stays there. All or nothing: raises torch.OutOfMemoryError."""
        if self._stay:
            self._pipeline.reload(self.all)
            self.away = False

    def keep(self, nbytes: int) -> None:
        """The first buckets of so many bytes stay on the device from the next step on; all others leave it now."""
        self.drop_prefetch()
        for bucket in self.all:
            bucket.stays = 0 < bucket.nbytes <= nbytes
            nbytes -= bucket.nbytes if bucket.stays else 0
        if self.away:
            self._offload([bucket for bucket in self.all if not bucket.stays])

    @property
    def kept(self) -> int:
        """The bytes of those that stay, and are on the device by now."""
        return sum(bucket.nbytes for bucket in self.all if bucket.stays and bucket.here())

    def prefetch(self) -> None:
        """Brings the first bucket of the next step to the device, if the memory is there."""
        first = next((bucket for bucket in self.all if bucket.away() and not bucket.stays), None)
        # Not on top of what backward needs: the peak stays what it is.
        if first is not None and self.window_bytes <= self._device.below_peak():
            with contextlib.suppress(torch.OutOfMemoryError):
                self._pipeline.prefetch(first, self.window_bytes)

    def drop_prefetch(self) -> None:
        """What has come early for the next step goes."""
        self._pipeline.drop()

    def close(self) -> None:
        """Frees all memory. The states are gone."""
        self.drop_prefetch()
        for bucket in self.all:
            bucket.close()

    def in_order(self, keys: Iterable[Any]) -> list[Any]:
        """As the optimizer has them by itself: somebody may walk over them, and draw a random number for each."""
        left = dict.fromkeys(keys)
        known = chain(self._order, (param for group in self._optimizer.param_groups for param in group["params"]))
        return list(dict.fromkeys(chain((key for key in known if key in left), left)))

    @property
    def device(self) -> torch.device:
        """Where states are in a step."""
        return self._device.torch_device

    @property
    def nbytes(self) -> int:
        """What all states take that can move."""
        return sum(bucket.nbytes for bucket in self.all)

    @property
    def window_bytes(self) -> int:
        """The device memory that states pass through in a step."""
        # Room for one that comes, one that is stepped, one that leaves, and for what is lost where the ring ends.
        largest = max((bucket.nbytes for bucket in self.all), default=0)
        large = largest if largest > self.residences.bucket_bytes // 2 else 0
        moving = sum(bucket.nbytes for bucket in self.all if not bucket.stays)
        return min(2 * self.residences.bucket_bytes + large, moving)

    @property
    def step_bytes(self) -> int:
        """The device memory that states take in a step, and not between steps."""
        if not self.away:
            return 0
        return self.nbytes if self.choice.at_once else self.window_bytes

    def _packed(self, layouts: Iterable[tuple[Param, StateLayout]]) -> list[Bucket]:
        return pack(layouts, self.residences.bucket_bytes // 2, in_order=self.choice.in_order)

    def _repacked(self, old: Bucket) -> list[Bucket]:
        """Buckets for states that have other tensors by now, or other shapes."""
        if old.residence is not None:
            old.residence.drop()
        buckets = self._packed(
            (param, layout_of(param, old.states.get(param, {}), self._split)) for param in old.params
        )
        for bucket in buckets:
            bucket.states = {param: old.states[param] for param in bucket.params if param in old.states}
            self.residences.house_anew(bucket, self._name)
        return buckets

    def _replace(self, bucket: Bucket) -> None:
        """Finds another residence for a bucket whose states have other tensors by now, or other shapes.

        All of it is on the device then. Where there is no room for it, it stays there.
        """
        old, bucket.residence = bucket.residence, None
        if old is not None and bucket.away():
            bucket.arrive(bucket.params, old.copy_out().to(self._device.torch_device))
        bucket.lay_out(self._split)
        if old is not None:
            old.drop()
        if self.residences.house_anew(bucket, self._name) and self.away:
            self._offload([bucket])

    def _offload(self, buckets: Iterable[Bucket]) -> None:
        """Copies to the residences what is on the device, and waits for that."""
        stream = self._device.current_stream()
        sent = [each for bucket in buckets if (each := self._pipeline.offload(bucket, stream)) is not None]
        if sent:
            last, _ = sent[-1]
            last.wait()

    def _offload_after_step(self, bucket: Bucket, stream: Stream) -> None:
        """Copies to its residence what is on the device, and has the stream wait for that.

        Where there is no room for it, it stays on the device, for the step is done.
        """
        try:
            sent = self._pipeline.offload(bucket, stream)
        except TierFull as error:
            _log.warning(
                "%s of states of %s stay on the device: %s",
                *(format_bytes(bucket.nbytes), self._name, str(error)),
            )
            return
        if sent is not None:
            copied, _ = sent
            copied.hold(stream)  # the memory is free for what comes next on the stream
        self.residences.poll()

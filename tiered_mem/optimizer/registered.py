"""The optimizers whose states a manager has."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Literal, get_args

import torch

from ..device.device import Device, DevicePeak
from ..device.transfer import TransferEngine
from ..policies.planning.disk_and_states import Crossing, StatesShare
from ..sizes import format_bytes
from ..spill.lower_tier import LowerTier
from ..tiers.host_tier import HostTier
from ..tiers.shelf import Exclusive
from .bucket import Residences
from .pipeline import Pipeline
from .separable import StepChoice
from .states import States
from .step_in_backward import StepInBackward
from .step_in_forward import StepInForward
from .stepping import Stepping
from .tiered_optimizer import TieredOptimizer, check_optimizer

_log = logging.getLogger("tiered_mem.optimizer")

# What states take of the host tier before they go to disk; the rest is for activations.
_HOST_SHARE = 0.5
_BUCKET_BYTES = 256 << 20
_PARTS = 32  # of a budget: by default bucket_bytes are no more than one
# What hides the ways of states, the least first.
_HIDDEN = (None, "forward", "backward")

Residency = Literal["host", "disk", "auto", "device-until-offload"]
Overlap = Literal["backward", "forward", "auto"]
# Whether there were states before the step, the bytes of its window, and the number of buckets that stay.
_Way = tuple[bool, int, int]


class RegisteredOptimizers:
    """Makes tiered optimizers of others, and knows them as long as they live.

    Nothing here but `count` is to be called by who has the manager's lock: `exclusive` takes it.

    peak: measures their steps.
    share: how much of the device those whose residency is "auto" may have; None is nothing.
    """

    def __init__(
        self,
        device: Device,
        engine: TransferEngine,
        host: HostTier,
        disk: LowerTier | None,
        exclusive: Exclusive,
        peak: DevicePeak,
        share: StatesShare | None = None,
    ) -> None:
        self._device = device
        self._engine = engine
        self._host = host
        self._disk = disk
        self._exclusive = exclusive
        self._all: weakref.WeakSet[TieredOptimizer] = weakref.WeakSet()
        self._sharing = None if share is None else _Sharing(share, peak)
        # An optimizer may die anywhere. Whoever calls next gives its memory back.
        self._forgotten: deque[States] = deque()

    def register(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        bucket_bytes: int | None,
        residency: Residency,
        separable: bool | None,
        overlap: Overlap | None,
        keep_gradients: bool,
        owner: object,
    ) -> TieredOptimizer:
        """What `TieringManager.register_optimizer` does. owner: lives as long as what is returned."""
        self.free()
        if isinstance(optimizer, TieredOptimizer) or any(other.wrapped is optimizer for other in self._all):
            raise ValueError("the optimizer is registered already: use what register_optimizer returned then")
        check_optimizer(optimizer, self._device)
        if bucket_bytes is None:
            budget = None if self._sharing is None else self._sharing.share.budget
            bucket_bytes = _BUCKET_BYTES if budget is None else min(_BUCKET_BYTES, budget // _PARTS)
        if residency not in get_args(Residency):
            names = ", ".join(map(repr, get_args(Residency)))
            raise ValueError(f"residency is {residency!r}; there are {names}")
        if residency == "disk" and self._disk is None:
            raise ValueError("residency 'disk' needs a disk tier: make the manager with a spill_dir")
        if overlap is not None and overlap not in get_args(Overlap):
            names = ", ".join(map(repr, get_args(Overlap)))
            raise ValueError(f"overlap is {overlap!r}; there are {names}, and None")
        if keep_gradients and overlap not in ("backward", "auto"):
            raise ValueError('keep_gradients=True is for overlap="backward" or "auto": no other frees gradients')
        disk = self._disk if residency in ("disk", "auto") else None
        host_share = _HOST_SHARE if residency == "auto" else 0.0
        residences = Residences(self._host, disk, self._exclusive, bucket_bytes, host_share)
        choice = StepChoice(optimizer, self._device, separable)
        name = type(optimizer).__name__
        if overlap is not None:
            try:
                choice.check_any_order(overlap)
            except ValueError as error:
                if overlap != "auto":
                    raise
                _log.info("%s has no overlap: %s", name, str(error))
                overlap = None
        in_order = choice.in_order or overlap is not None
        pipeline = Pipeline(
            self._device,
            self._engine,
            self._exclusive,
            residences,
            choice.split,
            name,
            in_order=in_order,
            # A plan would not see memory that goes to torch's pool with copies under way, or is taken at times.
            planned=self._sharing is not None,
            overlapped=overlap is not None,
        )
        stay = residency == "device-until-offload"
        around = contextlib.nullcontext if self._sharing is None else self._sharing.measured
        stepping = Stepping(optimizer, choice, pipeline)
        if overlap in ("forward", "auto"):
            stepping = StepInForward(optimizer, choice, pipeline)
        if overlap in ("backward", "auto"):
            instead = stepping if overlap == "auto" else None
            stepping = StepInBackward(optimizer, choice, pipeline, keep_gradients=keep_gradients, instead=instead)
        states = States(optimizer, choice, pipeline, stepping, stay=stay, around=around)
        tiered = TieredOptimizer(optimizer, states, owner)
        try:
            states.adopt()
        except BaseException:
            tiered.give_back_hooks()
            states.close()
            raise
        self._all.add(tiered)
        self._tell_share()
        if self._sharing is not None:
            if residency == "auto" and not states.at_once:
                self._sharing.states.add(states)
            if overlap is not None and not stay:
                self._sharing.overlapped.add(states)
                self._sharing.share.settled = False
        weakref.finalize(tiered, _forget, states, self._forgotten).atexit = False
        _tell(tiered, residency)
        return tiered

    def free(self) -> None:
        """Frees the memory of optimizers that nobody has any more."""
        while self._forgotten:
            states = self._forgotten.popleft()
            states.close()
            if self._sharing is not None:
                self._sharing.states.discard(states)
                self._sharing.overlapped.discard(states)
            self._tell_share()

    def _tell_share(self) -> None:
        """What is registered decides what is advised."""
        if self._sharing is not None:
            share, there = self._sharing.share, list(self._all)
            share.registered, share.at_once = bool(there), any(optimizer.at_once for optimizer in there)

    def poll(self) -> None:
        """Goes on with files that can be written by now, and with what is to stay on the device or not any more.

        Waits only for what leaves it.
        """
        if self._all:
            for optimizer in list(self._all):
                optimizer.states.poll()
        if self._sharing is not None:
            self._sharing.keep()

    def count(self) -> None:
        """Says how much of what is to stay is there, as a step may have left it since. In turn, before an event."""
        if self._sharing is not None:
            self._sharing.count()

    def finish(self) -> None:
        """Makes what is left of steps. Of those that were interrupted nothing is."""
        for optimizer in list(self._all):
            optimizer.states.finish()

    def wait(self) -> None:
        """Waits until every file is written."""
        self.free()
        for optimizer in list(self._all):
            optimizer.states.wait()

    def close(self) -> None:
        """Ends them all. Their states are gone."""
        for optimizer in list(self._all):
            optimizer.states.close()
        self.free()  # after the others, of which one may have died meanwhile


def _forget(states: States, forgotten: deque[States]) -> None:
    """Nobody can ask for a step any more. May be called anywhere, and does no more than that."""
    states.forgotten = True
    forgotten.append(states)


class _Sharing:
    """Has as much of the states stay on the device as is planned, and measures what steps take beside that.

    Keeps no states alive, for these know it.

    share: what is planned. peak: measures steps. states: those that may have a part. overlapped: those that may
    cross the link in forward or backward, as far as they do not stay.
    """

    def __init__(self, share: StatesShare, peak: DevicePeak) -> None:
        self.share = share
        self._peak = peak
        self.states: weakref.WeakSet[States] = weakref.WeakSet()
        self.overlapped: weakref.WeakSet[States] = weakref.WeakSet()
        self._kept_for: tuple[int | None, int, list[str | None]] | None = None
        # Of each optimizer how its last measured step was made, and what it took beside all that is kept.
        self._steps: weakref.WeakKeyDictionary[States, tuple[_Way, int]] = weakref.WeakKeyDictionary()

    def count(self) -> None:
        """Says how much of what is to stay is there, and whether steps are made as they will be."""
        if self.share.total and self.share.target != self.share.kept:
            self.share.kept = self._kept
        if not self.share.settled:
            self.share.settled = all(states.stepping.settled for states in list(self.overlapped))

    @contextlib.contextmanager
    def measured(self, states: States) -> Iterator[None]:
        """Measures what a step takes of the device, where it is made otherwise than the one before, or sees it.

        In the first step there are no states that come through the window, but it is allotted to them already. What
        it takes indeed shows in the second, and may leave room for more to stay. The window is made smaller where
        the budget would be passed.
        """
        pipeline = states.pipeline
        begun = any(bucket.states for bucket in pipeline.buckets)
        way = begun, pipeline.window_bytes, sum(bucket.stays for bucket in pipeline.buckets)
        before, _ = self._steps.get(states, (None, 0))
        if before == way:
            yield
            self._peak.look()
            return
        with self._peak.measured() as most:
            yield
        taken = most() - self._kept
        if self.share.budget is not None and not states.at_once:
            # A first step makes states of a bucket on the device, where a later one has its window.
            room = self.share.budget - taken + (way[1] if begun else pipeline.largest)
            if room < pipeline.window_bytes:
                pipeline.pass_through(room - _rounding(room))
        self._steps[states] = way, taken + (0 if begun else pipeline.window_bytes)
        self.share.step_peak = max(peak for _, peak in self._steps.values())
        if begun and before is not None and not before[0]:
            self.share.target = None

    def keep(self) -> None:
        """Has as much stay as is planned, after each change of the plan or the states."""
        share, beside = self.share, {states: states.stepping.beside for states in list(self.overlapped)}
        if not (share.total or self.states or beside or share.crossing(0) != (0, 0)):
            return
        # Those come first whose ways nothing would hide, and then those that less of the step's time does.
        sharing = sorted(self.states, key=lambda states: _HIDDEN.index(beside.get(states)))
        others = beside.keys() - set(sharing)
        there = [*sharing, *others]
        now = share.target, sum(states.version for states in there), [beside.get(states) for states in there]
        if now == self._kept_for:
            return
        total = sum(states.pipeline.nbytes for states in sharing)
        if total > share.total:
            share.target = None
        share.total = total
        share.forward, share.backward = (
            Crossing(
                sharing=_bytes(states for states in sharing if beside.get(states) == part),
                others=_bytes(states for states in others if beside[states] == part),
                first=max((states.pipeline.largest for states in beside if beside[states] == part), default=0),
            )
            for part in _HIDDEN[1:]
        )
        share.rounding = sum(_rounding(bucket.nbytes) for states in sharing for bucket in states.pipeline.buckets)
        left, done = share.planned, True
        for states in sharing:
            done &= states.keep(left)
            left -= sum(bucket.nbytes for bucket in states.pipeline.buckets if bucket.stays)
        share.kept = self._kept
        self._kept_for = now if done else None

    @property
    def _kept(self) -> int:
        return sum(states.pipeline.kept for states in list(self.states))


def _bytes(all_states: Iterable[States]) -> int:
    return sum(states.pipeline.nbytes for states in all_states)


def _rounding(nbytes: int) -> int:
    """The most that torch's pool gives beyond what it is asked for: of small pieces, and of large ones."""
    return 1 << 20 if nbytes > 1 << 20 else 1 << 9


def _tell(optimizer: TieredOptimizer, residency: Residency) -> None:
    name = type(optimizer.wrapped).__name__
    if optimizer.at_once:
        _log.info(
            "%s is stepped at once: all of its states, %s as far as is known, are on the device during a step. "
            "With separable=True it is stepped bucket by bucket, if it steps each parameter by itself",
            *(name, format_bytes(optimizer.states.pipeline.nbytes)),
        )
    if residency == "disk":
        _log.info(
            "the states of %s pass through %s of host memory on their ways to disk and back",
            *(name, format_bytes(optimizer.host_bytes)),
        )

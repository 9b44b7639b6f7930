"""The optimizers whose states a manager has."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import deque
from typing import Literal, get_args

import torch

from ..device.device import Device
from ..device.peak import DevicePeak
from ..device.transfer import TransferEngine
from ..policies import StatesShare
from ..sizes import format_bytes
from ..spill.lower_tier import LowerTier
from ..tiers.host_tier import HostTier
from ..tiers.shelf import Exclusive
from .buckets import Buckets
from .misuse import StepCheck, check_optimizer
from .residences import Residences
from .sharing import Sharing
from .states import States
from .tiered_optimizer import TieredOptimizer

_log = logging.getLogger("tiered_mem.optimizer")

# What states take of the host tier before they go to disk; the rest is for activations.
_HOST_SHARE = 0.5
_BUCKET_BYTES = 256 << 20

Residency = Literal["host", "disk", "auto", "device-until-offload"]


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
        self._share = share
        self._sharing = None if share is None else Sharing(share, peak)
        # An optimizer may die anywhere. Whoever calls next gives its memory back.
        self._forgotten: deque[States] = deque()

    def register(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        bucket_bytes: int | None,
        residency: Residency,
        separable: bool | None,
        owner: object,
    ) -> TieredOptimizer:
        """What `TieringManager.register_optimizer` does. owner: lives as long as what is returned."""
        self.free()
        if isinstance(optimizer, TieredOptimizer) or any(other.wrapped is optimizer for other in self._all):
            raise ValueError("the optimizer is registered already: use what register_optimizer returned then")
        check_optimizer(optimizer, self._device)
        if bucket_bytes is None:
            passing = None if self._share is None else self._share.passing
            bucket_bytes = _BUCKET_BYTES if passing is None else min(_BUCKET_BYTES, passing // 2)
        if residency not in get_args(Residency):
            names = ", ".join(map(repr, get_args(Residency)))
            raise ValueError(f"residency is {residency!r}; there are {names}")
        if residency == "disk" and self._disk is None:
            raise ValueError("residency 'disk' needs a disk tier: make the manager with a spill_dir")
        disk = self._disk if residency in ("disk", "auto") else None
        host_share = _HOST_SHARE if residency == "auto" else 0.0
        residences = Residences(self._host, disk, self._exclusive, bucket_bytes, host_share)
        stay = residency == "device-until-offload"
        buckets = Buckets(
            optimizer,
            self._device,
            self._engine,
            self._exclusive,
            residences,
            stay=stay,
            separable=separable,
        )
        around = contextlib.nullcontext if self._sharing is None else self._sharing.measured
        states = States(optimizer, buckets, around)
        tiered = TieredOptimizer(optimizer, states, owner, StepCheck(optimizer, self._device))
        try:
            states.adopt()
        except BaseException:
            tiered.give_back_hooks()
            states.close()
            raise
        self._all.add(tiered)
        self._tell_share()
        if self._sharing is not None and residency == "auto" and not states.at_once:
            self._sharing.add(states)
        weakref.finalize(tiered, self._forgotten.append, states).atexit = False
        _tell(tiered, residency)
        return tiered

    def free(self) -> None:
        """Frees the memory of optimizers that nobody has any more."""
        while self._forgotten:
            states = self._forgotten.popleft()
            states.close()
            if self._sharing is not None:
                self._sharing.leave_out(states)
            self._tell_share()

    def _tell_share(self) -> None:
        """What is registered decides what is advised."""
        if self._share is not None:
            self._share.registered = bool(self._all)
            self._share.at_once = any(optimizer.at_once for optimizer in list(self._all))

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


def _tell(optimizer: TieredOptimizer, residency: Residency) -> None:
    name = type(optimizer.wrapped).__name__
    if optimizer.at_once:
        _log.info(
            "%s is stepped at once: all of its states, %s as far as is known, are on the device during a step. "
            "With separable=True it is stepped bucket by bucket, if it steps each parameter by itself",
            *(name, format_bytes(optimizer.states.buckets.nbytes)),
        )
    if residency == "disk":
        _log.info(
            "the states of %s pass through %s of host memory on their ways to disk and back",
            *(name, format_bytes(optimizer.host_bytes)),
        )

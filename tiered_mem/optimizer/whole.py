"""All states of an optimizer on the device, as it knows them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..errors import TierFull
from ..sizes import format_bytes
from .bucket import Bucket
from .bucket_mover import BucketMover
from .layout import Layout, Movable, layout_of
from .own_tensors import OwnTensors
from .partial_step import Param
from .trial import params_of

_log = logging.getLogger("tiered_mem.optimizer")


class Whole:
    """Brings all states to the device and into the optimizer's `state`, and takes them over from there again.

    pack: makes new buckets. here: whether the states are where the optimizer looks for them.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        mover: BucketMover,
        movable: Movable,
        pack: Callable[[Iterable[tuple[Param, Layout]]], list[Bucket]],
    ) -> None:
        self._optimizer = optimizer
        self._mover = mover
        self._movable = movable
        self._pack = pack
        self._order: list[Any] = list(optimizer.state)
        self.here = False

    def bring(self, buckets: Sequence[Bucket]) -> None:
        """Raises torch.OutOfMemoryError and what the residences raise; then nothing has changed."""
        away = [bucket for bucket in buckets if bucket.away()]
        try:
            self._mover.bring_back(away)
        except BaseException:
            for bucket in away:
                bucket.forget_flat()
            raise
        state = self._optimizer.state
        everything = dict(state)
        for bucket in buckets:
            everything |= bucket.states
        state.clear()
        # Somebody may walk over them, and draw a random number for each.
        state.update((key, everything.pop(key)) for key in self._order if key in everything)
        state.update(everything)
        self.here = True

    def take_over(self, buckets: Sequence[Bucket], *, away: bool) -> list[Bucket]:
        """The states are the buckets' again, which may be others now. away: they leave the device.

        What there is no room for stays on the device.
        """
        self.here = False
        state = self._optimizer.state
        self._order = list(state)
        self.look(buckets)
        renewed: list[Bucket] = []
        for bucket in buckets:
            # What is no dictionary is the optimizer's own business.
            bucket.states = {
                param: state.pop(param) for param in bucket.params if isinstance(state.get(param), dict)
            }
            fits = bucket.fits(self._movable, every=isinstance(self._movable, OwnTensors))
            renewed += [bucket] if fits else self._repacked(bucket)
        if away:
            self._mover.send_after_step(renewed, self._name)
        return renewed

    def look(self, buckets: Sequence[Bucket] = ()) -> None:
        """Finds out which tensors can move of those that are in the optimizer's `state` now."""
        if isinstance(self._movable, OwnTensors):
            grads = [param.grad for param in params_of(self._optimizer)]
            flats = [bucket.flat for bucket in buckets if bucket.flat is not None]
            self._movable.look([vars(self._optimizer), grads], flats)

    def _repacked(self, old: Bucket) -> list[Bucket]:
        """Buckets for states that have other tensors by now, or other shapes."""
        if old.residence is not None:
            old.residence.release()
        layouts = [(param, layout_of(param, old.states.get(param, {}), self._movable)) for param in old.params]
        buckets = self._pack(layouts)
        for bucket in buckets:
            bucket.states = {param: old.states[param] for param in bucket.params if param in old.states}
            try:
                self._mover.settle_down([bucket])
            except TierFull as error:
                _log.warning(
                    "%s of states of %s have changed their shapes, and stay on the device: %s",
                    *(format_bytes(bucket.nbytes), self._name, str(error)),
                )
        return buckets

    @property
    def _name(self) -> str:
        return type(self._optimizer).__name__

"""Moves whole buckets between the device and their residences, outside of a step."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from ..device import Device
from ..errors import TierFull
from ..sizes import format_bytes
from ..tiers import DeviceSlot
from ..transfer import TransferEngine
from .bucket import Bucket, Leaving
from .residence import Exclusive
from .residences import Residences

_log = logging.getLogger("tiered_mem.optimizer")


class BucketMover:
    """Finds residences for buckets, sends them there and brings them back."""

    def __init__(
        self, device: Device, engine: TransferEngine, exclusive: Exclusive, residences: Residences
    ) -> None:
        self._device = device
        self._engine = engine
        self._exclusive = exclusive
        self._residences = residences

    def settle_down(self, buckets: Sequence[Bucket]) -> None:
        """Gives each bucket that has anything to move a residence. Raises TierFull; then none has got one."""
        moving = [bucket for bucket in buckets if bucket.nbytes]
        residences = self._residences.make([bucket.nbytes for bucket in moving])
        for bucket, residence in zip(moving, residences, strict=True):
            bucket.residence = residence

    def send_away(self, buckets: Sequence[Bucket]) -> None:
        """Copies to the residences what is on the device, and waits for that."""
        stream = self._device.current_stream()
        reading: list[Leaving] = []  # keeps alive what is read
        last = None
        for bucket in buckets:
            residence = bucket.residence
            if residence is None or not bucket.here():
                continue
            host = residence.take(blank=not bucket.away())
            leaving = bucket.leave(host, stream, set(bucket.params), self._device)
            with self._exclusive:
                last = self._engine.offload(leaving.moves)
            residence.leave(last)
            reading.append(leaving)
        if last is not None:
            last.wait()

    def bring_back(self, buckets: Sequence[Bucket]) -> None:
        """Copies to the device what is away. All or nothing: raises torch.OutOfMemoryError."""
        stream = self._device.current_stream()
        flats = {
            bucket: torch.empty(bucket.nbytes, dtype=torch.uint8, device=self._device.torch_device)
            for bucket in buckets
            if bucket.away()
        }
        for bucket, flat in flats.items():
            if (residence := bucket.residence) is None:
                continue
            host = residence.take(blank=False)
            with self._exclusive:
                (came,) = self._engine.reload([(host, DeviceSlot(flat, stream), residence.ticket)])
            residence.leave(None, came)
            came.hold(stream)
            bucket.arrive(bucket.params, flat)

    def replace(self, bucket: Bucket, name: str) -> bool:
        """Finds another residence for a bucket whose states have other tensors by now, or other shapes.

        All of it is on the device then. Where there is no room for it, it stays there, and the answer is False.
        name: of the optimizer.
        """
        old, bucket.residence = bucket.residence, None
        if old is not None and bucket.away():
            bucket.arrive(bucket.params, old.copy_out().to(self._device.torch_device))
        bucket.lay_out(self._device)
        if old is not None:
            old.release()
        try:
            self.settle_down([bucket])
        except TierFull as error:
            _log.warning(
                "%s of states of %s have changed their shapes, and stay on the device: %s",
                *(format_bytes(bucket.nbytes), name, str(error)),
            )
            return False
        return True

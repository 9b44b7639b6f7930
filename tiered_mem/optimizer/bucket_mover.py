"""Moves whole buckets between the device and their residences, outside of a step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..device import Device, Stream
from ..errors import TierFull
from ..fixed_slots import Exclusive
from ..host_tier import DeviceSlot
from ..sizes import format_bytes
from ..transfer import Ticket, TransferEngine
from .bucket import Bucket, Leaving
from .layout import Movable
from .pipeline import AHEAD
from .residence import Residences

_log = logging.getLogger("tiered_mem.optimizer")


class BucketMover:
    """Finds residences for buckets, sends them there and brings them back."""

    def __init__(
        self,
        device: Device,
        engine: TransferEngine,
        exclusive: Exclusive,
        residences: Residences,
        movable: Movable,
    ) -> None:
        self._device = device
        self._movable = movable
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
        sent = [each for bucket in buckets if (each := self._send(bucket, stream)) is not None]
        if sent:
            sent[-1].copied.wait()

    def send_after_step(self, buckets: Sequence[Bucket], name: str) -> None:
        """Copies to the residences what is on the device, and has the current stream wait for that.

        What there is no room for stays on the device, for the step is done. name: of the optimizer.
        """
        stream = self._device.current_stream()
        for bucket in buckets:
            try:
                sent = self._send(bucket, stream)
            except TierFull as error:
                _log.warning(
                    "%s of states of %s stay on the device: %s", format_bytes(bucket.nbytes), name, str(error)
                )
                continue
            if sent is not None:
                sent.copied.hold(stream)
                del sent  # its memory is free for what comes next on the stream
            self._residences.progress()

    def _send(self, bucket: Bucket, stream: Stream) -> _Sent | None:
        residence = bucket.residence
        if residence is None or not bucket.here():
            return None
        host = residence.take(blank=not bucket.away())
        copied = None
        try:
            leaving = bucket.leave(host, stream, set(bucket.params), self._movable)
            with self._exclusive:
                copied = self._engine.offload(leaving.moves)
        finally:
            residence.leave(copied)
        return _Sent(copied, leaving)

    def bring_back(self, buckets: Sequence[Bucket]) -> None:
        """Copies to the device what is away. All or nothing: raises torch.OutOfMemoryError."""
        stream = self._device.current_stream()
        flats = {
            bucket: torch.empty(bucket.nbytes, dtype=torch.uint8, device=self._device.torch_device)
            for bucket in buckets
            if bucket.away()
        }
        order = list(flats)
        for index, (bucket, flat) in enumerate(flats.items()):
            if (residence := bucket.residence) is None:
                continue
            for ahead in order[index + 1 : index + 1 + AHEAD]:
                if ahead.residence is not None:
                    ahead.residence.fetch()
            host = residence.take(blank=False)
            came = None
            try:
                with self._exclusive:
                    (came,) = self._engine.reload([(host, DeviceSlot(flat, stream), residence.ticket)])
            finally:
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
        bucket.lay_out(self._movable)
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


class _Sent(NamedTuple):
    """A bucket on its way to the host. leaving: is read until it is `copied`."""

    copied: Ticket
    leaving: Leaving

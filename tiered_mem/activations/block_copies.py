"""Copies of blocks between the device and the host, and where the blocks are then."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

from ..host_tier import DeviceSlot, HostSlot, HostTier
from ..stats import Counters, Moved
from ..transfer import TransferEngine
from .block import Block, Place


class BlockCopies:
    """Starts them. Blocks whose copy could not be started are where they were. One thread at a time."""

    def __init__(self, host: HostTier, engine: TransferEngine, counters: Counters) -> None:
        self._host = host
        self._engine = engine
        self._counters = counters

    def offload(self, moves: Sequence[tuple[Block, DeviceSlot, HostSlot]]) -> None:
        """To host slots, which go back to the tier where that fails."""
        if not moves:
            return
        try:
            ticket = self._engine.offload([(source, slot) for _, source, slot in moves])
        except BaseException:
            self._engine.synchronize()  # some of them may have been started
            for _, _, slot in moves:
                self._host.release(slot, None)
            raise
        leaving = Place.LEAVING
        for block, _, slot in moves:
            block.host = slot
            block.place = leaving
            block.ticket = ticket
            block.offloaded = True
        self._count(self._counters.offloaded, [(block.nbytes, slot) for block, _, slot in moves])

    def reload(self, moves: Sequence[tuple[Block, HostSlot, DeviceSlot]]) -> None:
        """From the host slots that the blocks are in, which go back to the tier when the copies have ended."""
        try:
            tickets = self._engine.reload([(source, slot, block.ticket) for block, source, slot in moves])
        except BaseException:
            self._engine.synchronize()
            raise
        arriving = Place.ARRIVING
        for (block, _, slot), ticket in zip(moves, tickets, strict=True):
            block.tensor = tensor = slot.tensor
            block.formed = True
            block.stream = slot.stream
            block.ticket = ticket
            block.host = None
            block.versions = [(tensor, tensor._version)]
            block.place = arriving
        for ticket, group in itertools.groupby(zip(moves, tickets, strict=True), operator.itemgetter(1)):
            self._host.release_all([source for (_, source, _), _ in group], ticket.event)
        self._count(self._counters.reloaded, [(block.nbytes, source) for block, source, _ in moves])

    def _count(self, moved: Moved, copies: Sequence[tuple[int, HostSlot]]) -> None:
        moved.count += len(copies)
        for nbytes, slot in copies:
            moved.nbytes += nbytes
            if not slot.lease.slab.pinned:
                self._counters.blocking.add(nbytes)

"""Copies of blocks between the device and the host, and where the blocks are then."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..device.device import Stream
from ..device.transfer import Ticket, TransferEngine
from ..ground.stats import Counters, Moved
from ..policies.places import Place
from ..tiers.host_tier import HostSlot, HostTier
from .block import Block


class BlockCopies:
    """Starts them. Blocks whose copy could not be started are where they were. One thread at a time."""

    def __init__(self, host: HostTier, engine: TransferEngine, counters: Counters) -> None:
        self._host = host
        self._engine = engine
        self._counters = counters

    def offload(self, moves: Sequence[tuple[Block, HostSlot]]) -> None:
        """To host slots, which go back to the tier where that fails."""
        if not moves:
            return
        try:
            # For most blocks contents() would only return the tensor, and take a call of each.
            of = [b.tensor if b.formed and b.tensor is not None else b.contents() for b, _ in moves]
            to = [slot.tensor for _, slot in moves]
            ticket = self._engine.offload(of, to, [block.stream for block, _ in moves])
        except BaseException:
            self._engine.synchronize()  # some of them may have been started
            for _, slot in moves:
                self._host.release(slot, None)
            raise
        leaving = Place.LEAVING
        for block, slot in moves:
            block.host = slot
            block.place = leaving
            block.ticket = ticket
            block.offloaded = True
        self._count(self._counters.offloaded, moves)

    def reload(self, moves: Sequence[tuple[Block, HostSlot]], tensors: list[torch.Tensor], stream: Stream) -> None:
        """From the host slots that the blocks are in, which go back to the tier when the copies have ended.

        tensors: where the bytes go, each in its block's form, allocated on `stream`.
        """
        try:
            filled = [block.ticket for block, _ in moves]
            tickets = self._engine.reload([slot.tensor for _, slot in moves], tensors, stream, filled)
        except BaseException:
            self._engine.synchronize()
            raise
        arriving = Place.ARRIVING
        left: dict[Ticket, list[HostSlot]] = {}
        for (block, slot), tensor, ticket in zip(moves, tensors, tickets, strict=True):
            block.tensor = tensor
            block.formed = True
            block.stream = stream
            block.ticket = ticket
            block.host = None
            block.versions = [(tensor, tensor._version)]
            block.place = arriving
            left.setdefault(ticket, []).append(slot)
        for ticket, slots in left.items():
            self._host.release_all(slots, ticket.event)
        self._count(self._counters.reloaded, moves)

    def _count(self, moved: Moved, moves: Sequence[tuple[Block, HostSlot]]) -> None:
        moved.count += len(moves)
        for block, slot in moves:
            moved.nbytes += block.nbytes
            if not slot.lease.slab.pinned:
                self._counters.blocking.add(block.nbytes)

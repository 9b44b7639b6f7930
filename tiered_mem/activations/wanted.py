"""Blocks on disk that are to be on the device."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..errors import TierFull
from ..host_tier import HostSlot, HostTier
from ..stats import Counters
from .block import Block, Place
from .spill_moves import Read
from .spiller import Spiller


class WantedBlocks:
    """Reads blocks that are wanted on the device into host memory, as far as that has room, in their order."""

    def __init__(self, host: HostTier, spiller: Spiller, counters: Counters) -> None:
        self._host = host
        self._spiller = spiller
        self._counters = counters
        self._blocks: dict[Block, None] = {}
        self._full_at = 0

    def __contains__(self, block: Block) -> bool:
        return block in self._blocks

    @property
    def busy(self) -> bool:
        """Whether any block is wanted, or moves between host and disk."""
        return self._spiller.busy or bool(self._blocks)

    def add(self, block: Block) -> None:
        self._blocks[block] = None

    def forget(self, block: Block) -> None:
        """The block does not need the disk any more."""
        self._blocks.pop(block, None)
        self._spiller.forget(block)

    def collect(self) -> list[Block]:
        """Takes note of what has ended. Those that are on disk no more; here they are forgotten."""
        self._spiller.collect()
        arrived = [block for block in self._blocks if block.place is not Place.DISK]
        for block in arrived:
            del self._blocks[block]
        return arrived

    def fetch(self, *, anew: bool = False) -> None:
        """Begins to read.

        anew: try although there was no room the last time.
        """
        if not self._blocks:
            return
        used = self._host.pool_stats().used
        if not anew and used >= self._full_at:
            return
        self._full_at = sys.maxsize
        for block in [block for block in self._blocks if not self._spiller.readable(block)]:
            del self._blocks[block]  # backward will hear of it
        try:
            self._spiller.fetch(list(self._blocks))
        except TierFull:
            self._full_at = self._host.pool_stats().used

    def read(self, block: Block, slots: Sequence[HostSlot]) -> None:
        """Begins to read a block that is needed now."""
        self._spiller.read([block], slots)

    def wait_for(self, block: Block) -> None:
        """Waits until a block that is being read is there. Raises what the disk tier found."""
        read = block.move
        if isinstance(read, Read):
            self._counters.disk_waits += not read.job.done
            read.job.wait()
            self._spiller.end_read(read)
            error = read.job.error
            if error is not None:
                try:
                    raise error
                finally:
                    del read, error  # or the error and this frame would keep each other, and the block, alive

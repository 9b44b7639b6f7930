"""Blocks on their way between host memory and the disk."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from itertools import groupby

import torch

from ..errors import TierFull
from ..ground.stats import Counters
from ..policies.places import Place
from ..spill.lower_tier import LowerTier, Piece
from ..tiers.host_tier import HostSlot, HostTier, groups
from .block import Block, Member, Read, Shared, Stored, Write

# Operations end in about the order in which they were begun, and each look at one costs the training thread time.
_LOOKED_AT = 8


class Spiller:
    """Writes blocks from their host slots to records, and reads them back into new ones.

    Neither waits: what has ended is noticed by `poll`, which whoever has the manager's lock calls from time to
    time. A slot is free when the file is complete. A block that is wanted back before that keeps its slot, and the
    file is then given up. What is on disk stays there until the block is on the device again, so that a block that
    was read too early is dropped from the host without being written once more.

    disk: belongs to whoever made it.
    step: is written into the records, for people.
    wanted: blocks on disk that are to be on the device, in that order. ahead: those that are to be on the host, and
    for which there was no room.
    """

    def __init__(self, host: HostTier, disk: LowerTier, counters: Counters) -> None:
        self._host = host
        self._disk = disk
        self._counters = counters
        self.step = 0
        self._filling: deque[Write] = deque()  # waits for copies to the host
        self._writing: list[Write] = []
        self._reading: list[Read] = []
        self._later: dict[Block, None] = {}
        self._clean: dict[Block, None] = {}  # on the host, and on disk still
        self.wanted: dict[Block, None] = {}
        self.ahead: dict[Block, None] = {}
        self._full_at = 0

    @property
    def busy(self) -> bool:
        """Whether any file operation is under way."""
        return bool(self._filling or self._writing or self._reading)

    @property
    def going_down(self) -> int:
        """The host memory in bytes that will be free when all writes have ended."""
        return sum(write.nbytes for writes in (self._filling, self._writing) for write in writes)

    @property
    def accepting(self) -> bool:
        """Whether the disk takes anything at all now."""
        return self._disk.accepts(1)

    def spill(self, blocks: Sequence[Block]) -> None:
        """Begins to write those of the blocks that are in host slots. The others are kept in mind for later."""
        going = []
        for block in blocks:
            if block.move is not None or (block.host is None and block.place is not Place.DEVICE):
                continue
            if block.host is not None and block.stored is not None:
                self._leave_host(block)
            elif block.host is None or not self._disk.accepts(block.nbytes):
                self._later[block] = None
            else:
                self._later.pop(block, None)
                going.append(block)
        for group in groups(going):
            members = [Member(block, slot, self._host.hold(slot)) for block in group if (slot := block.host)]
            tickets = dict.fromkeys(block.ticket for block in group if block.ticket is not None)
            write = Write(members, sum(block.nbytes for block in group), list(tickets))
            for block in group:
                block.move = write
            self._filling.append(write)
        self._begin_writes()

    def spill_later(self, nbytes: int) -> None:
        """Begins with blocks that were not on the host then, or that the disk had no room for or failed to write.

        nbytes: how much is to go down.
        """
        again = []
        for block in self._later:
            if nbytes <= 0:
                break
            if block.host is not None:
                again.append(block)
                nbytes -= block.nbytes
        self.spill(again)

    def drop_clean(self, nbytes: int) -> bool:
        """Takes blocks from the host that were read early, the last one first, until so many bytes are free.

        Whether there were any.
        """
        found = False
        while self._clean and nbytes > 0:
            block, _ = self._clean.popitem()
            nbytes -= block.nbytes
            self._leave_host(block)
            found = True
        return found

    def fetch(self, blocks: Sequence[Block]) -> None:
        """Begins to read those of the blocks that are on disk, in their order, as soon as the host has room.

        One that is still being written stays on the host, if no other waits for its room.
        """
        for block in blocks:
            if isinstance(block.move, Write) and not self.wanted and not self.ahead:
                block.move = None
            elif isinstance(block.move, Write) or (block.place is Place.DISK and block.move is None):
                self.ahead[block] = None
        self.fetch_wanted(anew=True)

    def _fetch(self, blocks: Sequence[Block]) -> None:
        """Begins to read those of the blocks that are on disk. Raises TierFull where the host has no room."""
        resting = [block for block in blocks if block.place is Place.DISK and block.move is None]
        for _, group in groupby(resting, key=lambda block: id(block.stored and block.stored.shared)):
            together = list(group)
            self.read(together, self._host.reserve([block.form for block in together]))

    def arrived(self) -> list[Block]:
        """The wanted blocks that are no longer on disk. They are not wanted here any more."""
        self.poll()
        arrived = [block for block in self.wanted if block.place is not Place.DISK]
        for block in arrived:
            del self.wanted[block]
        return arrived

    def fetch_wanted(self, *, anew: bool = False) -> None:
        """Begins to read wanted blocks, and then those ahead, in their order, as far as the host has room.

        anew: try although there was no room the last time.
        """
        if not self.wanted and not self.ahead:
            return
        used = self._host.pool_stats().used
        if not anew and used >= self._full_at:
            return
        self._full_at = sys.maxsize
        for block in [block for block in self.wanted if block.stored is not None and block.stored.unreadable]:
            del self.wanted[block]  # backward will hear of it
        try:
            self._fetch(list(self.wanted | self.ahead))
        except TierFull:
            self._full_at = self._host.pool_stats().used

    def wait_for(self, block: Block) -> None:
        """Waits until a block that is being read is there. Raises what the disk tier found."""
        read = block.move
        if isinstance(read, Read):
            self._counters.disk_waits += not read.job.done
            read.job.wait()
            self._end_read(read)
            error = read.job.error
            if error is not None:
                try:
                    raise error
                finally:
                    del read, error  # or the error and this frame would keep each other, and the block, alive

    def drop(self, block: Block) -> None:
        """The block needs neither the disk nor what is under way there any more."""
        block.sinking = block.rising = False
        block.move = None
        self.wanted.pop(block, None)
        self.ahead.pop(block, None)
        self._later.pop(block, None)
        self._clean.pop(block, None)
        if block.stored is not None:
            self._drop_record(block.stored.shared)
            block.stored = None

    def poll(self) -> bool:
        """Notices what has ended, and begins what can begin now. Whether anything ended."""
        ended = False
        for read in [read for read in self._reading[:_LOOKED_AT] if read.job.done]:
            self._end_read(read)
            ended = True
        for write in [
            write for write in self._writing[:_LOOKED_AT] if write.record is None or write.record.job.done
        ]:
            self._writing.remove(write)
            self._end_write(write)
            ended = True
        return self._begin_writes() or ended

    def wait(self) -> bool:
        """Waits for something to end, first for what will free host memory. False if nothing is under way.

        Raises DeviceFailed.
        """
        if self._writing and (record := self._writing[0].record) is not None:
            record.job.wait()
        elif self._filling:
            for copy in self._filling[0].copies:
                copy.wait()
        elif self._reading:
            self._reading[0].job.wait()
        else:
            return False
        self.poll()
        return True

    def _begin_writes(self) -> bool:
        """Writes what has arrived on the host. Whether anything ended without being written."""
        ended = False
        while self._filling and all(copy.event.query() for copy in self._filling[0].copies):
            write = self._filling.popleft()
            staying = [member for member in write.members if member.block.move is not write]
            write.members = [member for member in write.members if member.block.move is write]
            for member in staying:
                self._host.free(member.lease)
                ended = True
            if not write.members:
                continue
            pieces = [
                Piece(f"block.{block.key}", slot.tensor.data_ptr(), slot.tensor.nbytes, _name(slot.tensor.dtype))
                for block, slot, _ in write.members
            ]
            try:
                write.record = self._disk.write(pieces, step=self.step, kind="activation")
            except TierFull:
                self._end_write(write)
                ended = True
            else:
                self._writing.append(write)
        return ended

    def _end_write(self, write: Write) -> None:
        done = write.record is not None and write.record.job.error is None
        shared = None if write.record is None else Shared(write.record)
        for index, (block, _, lease) in enumerate(write.members):
            self._host.free(lease)
            if block.move is not write:
                continue
            block.move = None
            if shared is not None and done:
                shared.users += 1
                block.stored = Stored(shared, index)
                self._counters.spilled.add(block.nbytes)
                self._leave_host(block)
            else:
                self._later[block] = None
        if shared is not None and shared.users == 0:
            self._disk.release(shared.record)

    def read(self, blocks: Sequence[Block], slots: Sequence[HostSlot]) -> None:
        """Begins to read blocks of one record, which nothing moves, into these slots."""
        pieces = [block.stored for block in blocks if block.stored is not None]
        shared = pieces[0].shared
        wanted = [(piece.index, slot.tensor.data_ptr()) for piece, slot in zip(pieces, slots, strict=True)]
        members = [Member(block, slot, self._host.hold(slot)) for block, slot in zip(blocks, slots, strict=True)]
        # The record stays while it is read, whoever drops it meanwhile.
        shared.users += 1
        read = Read(members, self._disk.read(shared.record, wanted), shared)
        for block, slot, _ in members:
            block.host = slot
            block.move = read
            self.ahead.pop(block, None)
        self._reading.append(read)

    def _end_read(self, read: Read) -> None:
        """Takes note of a read that has ended, wherever it stands among those that are under way."""
        self._reading.remove(read)
        for block, slot, lease in read.members:
            self._host.free(lease)
            if block.move is not read:
                continue
            block.move = None
            if read.job.error is None:
                block.place = Place.HOST
                block.ticket = None
                self._clean[block] = None
                self._counters.fetched.add(block.nbytes)
            else:
                block.host = None
                self._host.release(slot, None)
                if block.stored is not None:
                    block.stored.unreadable = True
        self._drop_record(read.shared)

    def _leave_host(self, block: Block) -> None:
        """The copy that filled the slot has ended, or the slot was filled from disk: no event needs to pass."""
        if block.host is not None:
            self._host.release(block.host, None)
        block.host = None
        self._clean.pop(block, None)
        if block.place is Place.HOST:
            block.place = Place.DISK

    def _drop_record(self, shared: Shared) -> None:
        shared.users -= 1
        if shared.users == 0:
            self._disk.release(shared.record)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

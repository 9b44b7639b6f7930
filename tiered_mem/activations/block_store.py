"""The blocks that exist, and the steps that each takes between the tiers."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Collection, Iterable, Sequence

import torch

from ..device import Device
from ..errors import Closed, TierFull, changed_tensor
from ..host_tier import DeviceSlot, HostSlot, HostTier, groups
from ..policies import Release, Spill
from ..stats import Counters
from ..transfer import Ticket
from .block import Block, Place, Span, View, flat, span_of, view_of
from .block_copies import BlockCopies
from .host_room import HostRoom
from .marks import STAYS
from .spiller import Spiller
from .wanted import WantedBlocks

_log = logging.getLogger("tiered_mem.activations.block_store")


class BlockStore:
    """Does what a policy advises, as far as the place of each block allows it. One thread at a time.

    spiller: None where there is no disk tier.

    saved, saved_bytes: key and size of the blocks that were saved since they were last taken, and the sum.
    ended, ended_bytes: of those that nobody needs any more.
    """

    def __init__(
        self,
        device: Device,
        host: HostTier,
        copies: BlockCopies,
        counters: Counters,
        room: HostRoom,
        spiller: Spiller | None = None,
    ) -> None:
        self._device = device
        self._current_stream = device.current_stream
        self._host = host
        self._copies = copies
        self._counters = counters
        self._room = room
        self._spiller = spiller
        self._wanted = None if spiller is None else WantedBlocks(host, spiller, counters)
        self._blocks: dict[int, Block] = {}
        # None for a block that is gone by now.
        self.find = self._blocks.get
        self._by_span: dict[Span, Block] = {}
        self._keys = itertools.count()
        self._moves: list[tuple[Block, DeviceSlot, HostSlot]] = []  # to begin together
        self.saved: list[tuple[int, int]] = []
        self.saved_bytes = 0
        self.ended: list[int] = []
        self.ended_bytes = 0

    @property
    def blocks(self) -> Collection[Block]:
        return self._blocks.values()

    def save(self, tensor: torch.Tensor) -> tuple[Block, View]:
        """The block of the tensor's storage, held once more, and how the tensor lies in it.

        It is a new block if none holds the same contents.
        """
        span = span_of(tensor)
        version = tensor._version
        detached = tensor.detach()
        block = self._by_span.get(span)
        if block is None or block.versions[-1][1] != version or not block.unchanged():
            block = Block(next(self._keys), span, detached, self._current_stream())
            self._blocks[block.key] = self._by_span[span] = block
        block.holders += 1
        block.versions.append((detached, version))
        self.saved.append((block.key, block.nbytes))
        self.saved_bytes += block.nbytes
        return block, view_of(tensor, span, len(block.versions) - 1)

    def load(self, block: Block, view: View) -> torch.Tensor:
        """The saved tensor, ready for work that is issued from now on. Raises ChangedTensor and Closed."""
        for saved, version in block.versions:
            if saved._version != version:
                raise changed_tensor(view, view.origin)
        if block.changed:
            raise changed_tensor(view, view.origin)
        if block.place is Place.DISK and self._wanted is not None:
            self._bring_up(block, self._wanted)
        if block.place is Place.HOST:
            if self._wanted is None or block not in self._wanted:
                self._counters.reloads_on_demand += 1
            self.reload([block])
        if block.tensor is None:
            raise Closed("the manager was closed before this backward, and the activations with it")
        if not block.left:
            return block.versions[view.number][0]
        tensor = view.of(block.tensor)
        if block.ticket is not None and block.place is not Place.LEAVING:
            self._arrive(block, block.ticket, tensor)
        return tensor

    def offload(self, blocks: Sequence[Block]) -> None:
        """Starts to copy blocks to the host. One that finds no room there stays on the device and is counted."""
        chosen = [block for block in blocks if self._can_leave(block)]
        for block in chosen:
            block.chosen = True
        try:
            for group in groups(chosen):
                self._give_slots(group)
            self._start_offloads()
        finally:
            due = [block for block in chosen if block.due]
            for block in chosen:
                block.chosen = block.due = False
            for _, _, slot in self._moves:  # an error left them
                self._host.release(slot, None)
            self._moves.clear()
        self.release(due)
        above = self._room.above
        if above:
            self._relieve(above)

    def release(self, blocks: Iterable[Block]) -> None:
        """Gives up the device memory of blocks that are leaving: it is free for what comes after their copy."""
        for block in blocks:
            ticket = block.ticket
            if block.place is not Place.LEAVING or ticket is None:
                block.due = block.chosen  # about to leave: as soon as it does
                continue
            for saved, version in block.versions:
                if saved._version != version:
                    block.changed = True
            if block.stream.stream_id not in ticket.held:
                ticket.hold(block.stream, "release")
            block.place = Place.DISK if block.host is None else Place.HOST
            block.left = True
            self._forget_device(block)
            self._counters.released.count += 1
            self._counters.released.nbytes += block.nbytes

    def reload_early(self, blocks: Sequence[Block]) -> None:
        """As reload, on a policy's advice: where the device is full now, backward will ask again when it must."""
        try:
            self.reload(blocks)
        except torch.OutOfMemoryError:
            self._counters.postponed += sum(block.place is Place.HOST for block in blocks)

    def spill(self, blocks: Sequence[Block]) -> None:
        """Starts to write to disk those of the blocks whose bytes are on the host or on their way there."""
        if self._spiller is not None:
            self._spiller.spill(blocks)

    def fetch(self, blocks: Sequence[Block]) -> None:
        """Starts to read blocks that are on disk into host memory, as far as that has room."""
        if self._spiller is not None:
            with contextlib.suppress(TierFull):
                self._spiller.fetch(blocks)

    def progress(self) -> None:
        """Goes on with what was waiting for a file operation that has ended."""
        if self._wanted is None or not self._wanted.busy:
            return
        self.reload_early(self._wanted.collect())
        self._wanted.fetch()

    def begin_step(self) -> None:
        """A forward begins. The host waits where it is too many steps ahead of the device."""
        self._room.begin_step()

    def settle(self) -> None:
        """Waits for the file operations under way."""
        if self._spiller is not None:
            self._spiller.drain()

    def reload(self, blocks: Sequence[Block]) -> None:
        """Starts to copy blocks to the device. What is on disk is read first, and copied when `progress` finds it.

        Raises torch.OutOfMemoryError where it has no room; what it had room for is on its way then.
        """
        moves: list[tuple[Block, HostSlot, DeviceSlot]] = []
        stream = self._current_stream()
        try:
            with torch.inference_mode(False):  # backward needs tensors with a version, whoever asks for them
                for block in blocks:
                    if block.place is Place.HOST and block.host is not None:
                        tensor = self._device.empty(block.nbytes, block.dtype)
                        moves.append((block, block.host, DeviceSlot(tensor, stream)))
                    elif block.place is Place.LEAVING:
                        self._stay(block)
                    elif block.place is Place.DISK and self._wanted is not None:
                        self._wanted.add(block)
        finally:
            self._copies.reload(moves)
            if self._wanted is not None:
                for block, _, _ in moves:
                    self._wanted.forget(block)
        if self._wanted is not None:
            self._wanted.fetch(anew=True)

    def reserve(self, wanted: Sequence[tuple[int, torch.dtype]]) -> list[HostSlot]:
        """Slots of the host tier, one for each number of bytes, for which room is made or waited for.

        Raises TierFull.
        """
        while (slots := self._host.find(wanted)) is None:
            nbytes = sum(size for size, _ in wanted)
            if not self._host.can_hold(nbytes) or not self._make_room(nbytes):
                return self._host.reserve(wanted)
        return slots

    def let_go(self, block: Block) -> None:
        """One saved tensor less holds the block. Without any it is gone, which is noted in `ended`.

        This may be called within a `__del__`, which is no place to start copies, nor for a policy to raise.
        """
        block.holders -= 1
        if block.holders == 0 and block.place is not Place.GONE:
            self.ended.append(block.key)
            self.ended_bytes += block.nbytes
            self.retire(block)

    def take_saved(self) -> tuple[tuple[int, int], ...]:
        saved, self.saved, self.saved_bytes = tuple(self.saved), [], 0
        return saved

    def take_ended(self) -> tuple[int, ...]:
        ended, self.ended, self.ended_bytes = tuple(self.ended), [], 0
        return ended

    def retire(self, block: Block) -> None:
        """Gives up all that a block has. What a copy still uses outlives the copy."""
        ticket = block.ticket
        if ticket is not None:
            if block.place is Place.LEAVING or block.place is Place.ARRIVING:
                ticket.hold(block.stream, "drop")
            if block.host is not None:
                self._host.release(block.host, ticket.event)
        elif block.host is not None:
            self._host.release(block.host, None)
        if self._wanted is not None:
            self._wanted.forget(block)
        self._forget_device(block)
        block.host = block.ticket = None
        block.place = Place.GONE
        del self._blocks[block.key]

    def _can_leave(self, block: Block) -> bool:
        tensor = block.tensor
        return (
            block.place is Place.DEVICE
            and tensor is not None
            and block.unchanged()
            and not hasattr(tensor.untyped_storage(), STAYS)
            and self._device.plain_layout(tensor)
        )

    def _make_room(self, nbytes: int) -> bool:
        """Makes or waits for room in the host tier. Whether there may be so much by now."""
        if self._spiller is not None:
            self._start_offloads()  # what is on its way to the host can go on to the disk
            if self._spiller.collect():
                return True
            used = self._host.pool_stats().used
            self._relieve(nbytes)
            if self._host.pool_stats().used < used:
                return True
        return self._room.wait(nbytes)

    def _relieve(self, nbytes: int) -> None:
        """Lets so many bytes of the host tier go down to disk, as the policy says."""
        for answer in self._room.relief(nbytes, self._blocks):
            self.release([self._blocks[action.key] for action in answer if isinstance(action, Release)])
            self.spill([self._blocks[action.key] for action in answer if isinstance(action, Spill)])

    def _give_slots(self, blocks: Sequence[Block]) -> None:
        """Finds host memory for blocks that leave. Small ones share a lease; who finds no room is left out."""
        try:
            slots = self.reserve([(block.nbytes, block.dtype) for block in blocks])
        except TierFull as error:
            if len(blocks) == 1:
                self._keep(blocks[0], error)
            else:
                for block in blocks:
                    self._give_slots([block])
            return
        for block, slot in zip(blocks, slots, strict=True):
            tensor = block.tensor
            if tensor is None:
                raise RuntimeError(f"block {block.key} is not on the device")
            # What was away once lies in memory of its own, of which the span says nothing.
            whole = tensor if block.left else flat(tensor, block.span)
            self._moves.append((block, DeviceSlot(whole, block.stream), slot))

    def _keep(self, block: Block, error: TierFull) -> None:
        if self._counters.kept.count == 0:
            _log.warning("an activation stays on the device: %s. Later ones are only counted", str(error))
        block.no_room = True
        self._counters.kept.add(block.nbytes)

    def _start_offloads(self) -> None:
        """Begins the copies of all that has a slot."""
        moves, self._moves = self._moves, []
        self._copies.offload(moves)

    def _stay(self, block: Block) -> None:
        """The block is wanted before it was released: it has been on the device all the time."""
        if block.host is not None and block.ticket is not None:
            self._host.release(block.host, block.ticket.event)
        if self._wanted is not None:
            self._wanted.forget(block)
        block.unwanted = block.ticket
        block.host = block.ticket = None
        block.place = Place.DEVICE

    def _arrive(self, block: Block, ticket: Ticket, tensor: torch.Tensor) -> None:
        """Makes the reader's stream wait for the reload. Each stream that reads waits once."""
        stream = self._current_stream()
        if stream.stream_id not in ticket.held:
            ticket.hold(stream, "reload")
        block.place = Place.DEVICE
        if stream.stream_id != block.stream.stream_id:
            # The memory goes back to the pool of the stream it came from, which knows nothing of this one.
            tensor.record_stream(stream)  # type: ignore[arg-type]

    def _bring_up(self, block: Block, wanted: WantedBlocks) -> None:
        """Reads a block that is needed now: if there is no other way, into memory beyond the limit."""
        if block.move is None:
            size = [(block.nbytes, block.dtype)]
            try:
                slots = self.reserve(size)
            except TierFull:
                self._counters.overflowed += 1
                slots = self._host.overflow(size)
            wanted.read(block, slots)
        with self._room.waiting():
            wanted.wait_for(block)

    def _forget_device(self, block: Block) -> None:
        if block.unwanted is not None:
            block.unwanted.hold(block.stream, "drop")
        block.unwanted = None
        block.tensor = None
        block.versions.clear()
        if self._by_span.get(block.span) is block:
            del self._by_span[block.span]

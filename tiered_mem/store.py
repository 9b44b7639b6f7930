"""The blocks that exist, and the steps that each takes between the tiers."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from .block import Block, Place, Span, View, flat, groups, span_of, view_of
from .errors import Closed, TierFull, changed_tensor
from .host_room import Advise, HostRoom
from .marks import stays
from .spiller import Spiller
from .stats import Counters
from .tiers import DeviceSlot, DeviceTier, HostSlot, HostTier
from .trace import Trace
from .transfer import Ticket, TransferEngine
from .wanted import WantedBlocks

_log = logging.getLogger("tiered_mem.store")


class BlockStore:
    """Does what a policy advises, as far as the place of each block allows it. One thread at a time.

    advise: says which blocks may go down to disk.
    spiller: None where there is no disk tier.
    """

    def __init__(
        self,
        device: DeviceTier,
        host: HostTier,
        engine: TransferEngine,
        counters: Counters,
        advise: Advise,
        trace: Trace | None = None,
        spiller: Spiller | None = None,
    ) -> None:
        self._device = device
        self._leaving_next: dict[Block, bool] = {}  # whether to release it as soon as it is leaving
        self._host = host
        self._spiller = spiller
        self._engine = engine
        self._counters = counters
        self._blocks: dict[int, Block] = {}
        self._room = HostRoom(host, spiller, advise, self._blocks, counters, trace)
        self._wanted = None if spiller is None else WantedBlocks(host, spiller, self._room, counters)
        self._by_span: dict[Span, Block] = {}
        self._keys = itertools.count()

    @property
    def blocks(self) -> Collection[Block]:
        return self._blocks.values()

    def find(self, key: int) -> Block | None:
        """None for a block that is gone by now."""
        return self._blocks.get(key)

    def save(self, tensor: torch.Tensor) -> tuple[Block, View]:
        """The block of the tensor's storage, held once more, and how the tensor lies in it.

        It is a new block if none holds the same contents.
        """
        span = span_of(tensor)
        version = tensor._version
        detached = tensor.detach()
        block = self._by_span.get(span)
        if block is None or block.versions[-1][1] != version or not block.unchanged():
            block = Block(next(self._keys), span, detached.dtype, self._device.adopt(detached))
            self._blocks[block.key] = self._by_span[span] = block
        block.holders += 1
        block.versions.append((detached, version))
        return block, view_of(tensor, span, len(block.versions) - 1)

    def load(self, block: Block, view: View) -> torch.Tensor:
        """The saved tensor, ready for work that is issued from now on. Raises ChangedTensor and Closed."""
        if not block.unchanged():
            raise changed_tensor(view, view.origin)
        if block.place is Place.DISK and self._wanted is not None:
            self._wanted.bring_up(block, self.make_room)
        if block.place is Place.HOST:
            if self._wanted is None or block not in self._wanted:
                self._counters.reloads_on_demand += 1
            self.reload([block])
        if block.device is None:
            raise Closed("the manager was closed before this backward, and the activations with it")
        if not block.left:
            return block.versions[view.number][0]
        tensor = view.of(block.device.tensor)
        if block.ticket is not None and block.place is not Place.LEAVING:
            self._arrive(block, block.device, block.ticket, tensor)
        return tensor

    def offload(self, blocks: Sequence[Block]) -> None:
        """Starts to copy blocks to the host. One that finds no room there stays on the device and is counted."""
        moves: list[tuple[Block, DeviceSlot, HostSlot]] = []

        def more_room(nbytes: int) -> bool:
            # What is on its way to the host can go on to the disk, and make room for the others.
            if self._spiller is not None:
                under_way = moves[:]
                moves.clear()
                self._start_offloads(under_way)
            return self.make_room(nbytes)

        self._leaving_next = {block: False for block in blocks if self._can_leave(block)}
        try:
            for block, slot in self._find_room(list(self._leaving_next), more_room):
                moves.append((block, self._source(block), slot))
        except BaseException:
            for _, _, slot in moves:
                self._host.release(slot, None)
            raise
        finally:
            due = [block for block, released in self._leaving_next.items() if released]
            self._leaving_next = {}
        self._start_offloads(moves)
        self.release(due)
        self._room.keep(self.release)

    def release(self, blocks: Sequence[Block]) -> None:
        """Gives up the device memory of blocks that are leaving: it is free for what comes after their copy."""
        for block in blocks:
            if block in self._leaving_next and block.place is Place.DEVICE:
                self._leaving_next[block] = True
            if block.place is not Place.LEAVING or block.device is None or block.ticket is None:
                continue
            block.changed = not block.unchanged()
            block.ticket.hold(block.device.stream, "release")
            block.place = Place.DISK if block.host is None else Place.HOST
            block.left = True
            self._forget_device(block)
            self._counters.released.add(block.nbytes)

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
        moves = []
        stream = self._device.current_stream()
        try:
            for block in blocks:
                if block.place is Place.LEAVING:
                    self._stay(block)
                elif block.place is Place.HOST and block.host is not None:
                    block.device = self._device.reserve(block.nbytes, block.dtype, stream)
                    block.place = Place.ARRIVING
                    moves.append((block, block.host, block.device))
                elif block.place is Place.DISK and self._wanted is not None:
                    self._wanted.add(block)
        finally:
            self._start_reloads(moves)
        if self._wanted is not None:
            self._wanted.fetch(anew=True)

    def make_room(self, nbytes: int) -> bool:
        """Makes or waits for room in the host tier. Whether there may be so much by now."""
        return self._room.make(nbytes, self.release)

    def let_go(self, block: Block) -> bool:
        """One saved tensor less holds the block. Whether that was the last one: then the block is gone."""
        block.holders -= 1
        if block.holders > 0 or block.place is Place.GONE:
            return False
        self.retire(block)
        return True

    def retire(self, block: Block) -> None:
        """Gives up all that a block has. What a copy still uses outlives the copy."""
        under_way = block.place in (Place.LEAVING, Place.ARRIVING)
        if under_way and block.device is not None and block.ticket is not None:
            block.ticket.hold(block.device.stream, "drop")
        if block.host is not None:
            self._host.release(block.host, block.ticket.event if block.ticket is not None else None)
        self._forget_disk(block)
        self._forget_device(block)
        block.host = block.ticket = None
        block.place = Place.GONE
        del self._blocks[block.key]

    def _can_leave(self, block: Block) -> bool:
        return (
            block.place is Place.DEVICE
            and block.device is not None
            and block.unchanged()
            and not stays(block.device.tensor.untyped_storage())
            and self._device.plain_layout(block.device.tensor)
        )

    def _source(self, block: Block) -> DeviceSlot:
        slot = block.device
        if slot is None:
            raise RuntimeError(f"block {block.key} is not on the device")
        # What was away once lies in memory of its own, of which the span says nothing.
        return slot if block.left else DeviceSlot(flat(slot.tensor, block.span), slot.stream)

    def _find_room(
        self, blocks: Sequence[Block], more_room: Callable[[int], bool]
    ) -> Iterator[tuple[Block, HostSlot]]:
        """Blocks with the host slots they are to have. Small ones share a lease; who finds no room is left out."""
        for group in groups(blocks):
            try:
                wanted = [(block.nbytes, block.dtype) for block in group]
                yield from zip(group, self._host.reserve(wanted, more_room=more_room), strict=True)
            except TierFull as error:
                if len(group) == 1:
                    self._keep(group[0], error)
                else:
                    for block in group:
                        yield from self._find_room([block], more_room)

    def _keep(self, block: Block, error: TierFull) -> None:
        if self._counters.kept.count == 0:
            _log.warning("an activation stays on the device: %s. Later ones are only counted", str(error))
        block.no_room = True
        self._counters.kept.add(block.nbytes)

    def _start_offloads(self, moves: Sequence[tuple[Block, DeviceSlot, HostSlot]]) -> None:
        if not moves:
            return
        try:
            ticket = self._engine.offload([(source, slot) for _, source, slot in moves])
        except BaseException:
            self._engine.synchronize()  # some of them may have been started
            for _, _, slot in moves:
                self._host.release(slot, None)
            raise
        for block, _, slot in moves:
            block.host = slot
            block.place = Place.LEAVING
            block.ticket = ticket
            block.offloaded = True
            self._counters.offloaded.add(block.nbytes)
            if not slot.pinned:
                self._counters.blocking.add(block.nbytes)

    def _start_reloads(self, moves: Sequence[tuple[Block, HostSlot, DeviceSlot]]) -> None:
        try:
            tickets = self._engine.reload([(source, slot, block.ticket) for block, source, slot in moves])
        except BaseException:
            self._engine.synchronize()
            for block, _, _ in moves:
                block.device = None
                block.place = Place.HOST
            raise
        for (block, source, slot), ticket in zip(moves, tickets, strict=True):
            block.ticket = ticket
            block.host = None
            block.versions = [(slot.tensor, slot.tensor._version)]
            self._host.release(source, ticket.event)
            self._forget_disk(block)
            self._counters.reloaded.add(block.nbytes)
            if not source.pinned:
                self._counters.blocking.add(block.nbytes)

    def _stay(self, block: Block) -> None:
        """The block is wanted before it was released: it has been on the device all the time."""
        if block.host is not None and block.ticket is not None:
            self._host.release(block.host, block.ticket.event)
        self._forget_disk(block)
        block.unwanted = block.ticket
        block.host = block.ticket = None
        block.place = Place.DEVICE

    def _arrive(self, block: Block, slot: DeviceSlot, ticket: Ticket, tensor: torch.Tensor) -> None:
        """Makes the reader's stream wait for the reload. Each stream that reads waits once."""
        stream = self._device.current_stream()
        ticket.hold(stream, "reload")
        block.place = Place.DEVICE
        if stream.stream_id != slot.stream.stream_id:
            # The memory goes back to the pool of the stream it came from, which knows nothing of this one.
            tensor.record_stream(stream)  # type: ignore[arg-type]

    def _forget_disk(self, block: Block) -> None:
        if self._wanted is not None:
            self._wanted.forget(block)

    def _forget_device(self, block: Block) -> None:
        if block.unwanted is not None and block.device is not None:
            block.unwanted.hold(block.device.stream, "drop")
        block.unwanted = None
        block.device = None
        block.versions.clear()
        if self._by_span.get(block.span) is block:
            del self._by_span[block.span]

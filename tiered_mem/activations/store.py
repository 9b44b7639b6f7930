"""The blocks that exist, the steps that each takes between the tiers, and room in host memory for them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable, Sequence
from numbers import Integral
from operator import attrgetter
from typing import Any, get_args

import torch

from ..device.device import Device, Stream
from ..device.torch_private import storage_id
from ..device.transfer import Ticket, TransferEngine
from ..errors import Closed, PolicyError, TierFull, changed_tensor
from ..ground.arguments import one_of
from ..ground.stats import Counters, Moved
from ..policies.actions import Action, Advice, Each, How, Keep, OfLayer, Recompute, Release, Spill
from ..policies.base import HostPressure, Policy
from ..policies.places import ON_DEVICE, Place
from ..tiers.host_tier import Form, HostSlot, HostTier, groups
from ..trace.recorder import Trace
from .block import Block, SavedBlocks, View
from .movable import STAYS
from .spiller import Spiller

_log = logging.getLogger("tiered_mem.activations")

# The share of the host tier above which blocks go down to disk, so that what comes next finds room.
_HIGH_WATER = 0.75


class BlockStore:
    """Does what a policy advises, as far as the place of each block allows it. One thread at a time.

    Blocks whose copy could not be started are where they were.

    policy: says what may go down to disk. Where it has planned that, it is asked only when nothing is on its way
        that makes room, and not before the host tier is full.
    spiller: None where there is no disk tier. Then all room comes from slots that are on their way back.
    blocks: those that exist.
    """

    def __init__(
        self,
        device: Device,
        host: HostTier,
        engine: TransferEngine,
        policy: Policy,
        counters: Counters,
        *,
        spiller: Spiller | None = None,
        trace: Trace | None = None,
    ) -> None:
        self._device = device
        self._current_stream = device.current_stream
        self._host = host
        self._engine = engine
        self._policy = policy
        self._counters = counters
        self._spiller = spiller
        self._trace = trace
        self.blocks = SavedBlocks(device)
        self._moves: list[tuple[Block, HostSlot]] = []  # to begin together
        self._backups: dict[Block, HostSlot] = {}  # what stayed on the host of blocks that were reloaded

    def load(self, block: Block, view: View) -> torch.Tensor:
        """The saved tensor, ready for work that is issued from now on. Raises ChangedTensor and Closed."""
        for saved, version in block.versions:
            if saved._version != version:
                raise changed_tensor(view.form, view.origin)
        if block.changed:
            raise changed_tensor(view.form, view.origin)
        if block.place is Place.DISK and self._spiller is not None:
            self._bring_up(block, self._spiller)
        if block.place is Place.HOST:
            if self._spiller is None or block not in self._spiller.wanted:
                self._counters.reloads_on_demand += 1
            self.reload([block])
        if (tensor := block.tensor) is None:
            raise Closed("the manager was closed before this backward, and the activations with it")
        if not block.left:
            return block.versions[view.number][0]
        if view.form is not block.form and view.form != block.form:
            tensor = view.of(tensor)
        ticket = block.ticket
        if ticket is not None and block.place is not Place.LEAVING:
            stream = self._current_stream()
            if stream.stream_id not in ticket.held:
                ticket.hold(stream, "reload")  # each stream that reads waits once
            block.place = Place.DEVICE
            if stream.stream_id != block.stream.stream_id:
                # The memory goes back to the pool of the stream it came from, which knows nothing of this one.
                tensor.record_stream(stream)  # type: ignore[arg-type]
        return tensor

    def offload(self, blocks: Sequence[Block]) -> None:
        """Starts to copy blocks to the host. One that finds no room there stays on the device and is counted."""
        chosen = []
        for block in blocks:
            if block.place is Place.DEVICE:
                block.chosen = self._can_leave(block)
                block.stuck = not block.chosen
                if block.chosen and block in self._backups:
                    self._leave_again(block)
                elif block.chosen:
                    chosen.append(block)
        try:
            for group in groups(chosen):
                self._give_slots(group)
            self._start_offloads()
        finally:
            due = [block for block in chosen if block.due]
            for block in chosen:
                block.chosen = block.due = False
            for _, slot in self._moves:  # an error left them
                self._host.release(slot, None)
            self._moves.clear()
        self.release(due)
        if self._spiller is not None and not self._policy.plans_spills:
            used, limit = self._host.usage()
            if limit is not None and (above := used - int(_HIGH_WATER * limit)) > 0:
                self._relieve(above, self._spiller)

    def release(self, blocks: Iterable[Block]) -> None:
        """Gives up the device memory of blocks that are leaving: it is free for what comes after their copy."""
        released = self._counters.released
        for block in blocks:
            ticket = block.ticket
            if block.place is not Place.LEAVING or ticket is None:
                block.due = block.chosen  # about to leave: as soon as it does
                continue
            block.changed = not block.unchanged()
            if block.stream.stream_id not in ticket.held:
                ticket.hold(block.stream, "release")
            block.place = Place.DISK if block.host is None else Place.HOST
            block.left = True
            self._free_device(block)
            self.blocks.resident -= block.nbytes
            released.count += 1
            released.nbytes += block.nbytes

    def settle(self, storages: Collection[int]) -> None:
        """Has the current stream wait for copies to the host that read from these storages, by their ids."""
        stream = self._current_stream()
        for block in self.blocks.by_key.values():
            if block.span[0] in storages:
                copy = block.ticket if block.place is Place.LEAVING else block.unwanted
                if copy is not None:
                    copy.hold(stream)

    def reload_early(self, blocks: Sequence[Block]) -> None:
        """As reload, on a policy's advice: where the device is full now, backward will ask again when it must."""
        try:
            self.reload(blocks)
        except torch.OutOfMemoryError:
            self._counters.postponed += sum(block.place is Place.HOST for block in blocks)

    def spill(self, blocks: Sequence[Block]) -> None:
        """Starts to write to disk those of the blocks whose bytes are on the host or on their way there."""
        if self._spiller is not None:
            for block in blocks:
                block.sinking = block.place is Place.LEAVING or block.place is Place.HOST
            self._spiller.spill(blocks)

    def retain(self, blocks: Sequence[Block]) -> None:
        """Of blocks that are on the host or on their way there, the bytes stay there with the next reload."""
        for block in blocks:
            block.retained = block.place is Place.LEAVING or block.place is Place.HOST

    def fetch(self, blocks: Sequence[Block]) -> None:
        """Starts to read blocks that are on disk into host memory, as soon as that has room."""
        if self._spiller is not None:
            for block in blocks:
                block.rising |= block.below_host
                block.sinking = False
            self._spiller.fetch(blocks)

    def poll(self) -> None:
        """Goes on with what was waiting for a file operation that has ended."""
        spiller = self._spiller
        if spiller is not None and (spiller.busy or spiller.wanted or spiller.ahead):
            self.reload_early(spiller.arrived())
            spiller.fetch_wanted()

    def begin_step(self) -> None:
        """A forward begins. Waits for slots of steps long past, or each step would take new ones.

        Raises OffloadRefused while a graph is captured.
        """
        self._device.refuse_capture()
        self._host.begin_step()
        if self._host.overdue:
            self._counters.step_waits += 1
            with self._waiting():
                while self._host.overdue:
                    self._host.wait()

    def wait(self) -> None:
        """Waits for the file operations under way."""
        while self._spiller is not None and self._spiller.wait():
            pass

    def reload(self, blocks: Sequence[Block]) -> None:
        """Starts to copy blocks to the device. What is on disk is read first, and copied when `poll` finds it.

        Raises torch.OutOfMemoryError where it has no room; what it had room for is on its way then.
        """
        moves: list[tuple[Block, HostSlot]] = []
        tensors: list[torch.Tensor] = []
        stream, device = self._current_stream(), self._device.torch_device
        try:
            # Backward needs tensors with a version, whoever asks for them. To leave the mode takes long.
            with torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext():
                for block in blocks:
                    if block.place is Place.HOST and block.host is not None:
                        _, dtype, shape, stride = block.form
                        tensors.append(torch.empty_strided(shape, stride, dtype=dtype, device=device))
                        moves.append((block, block.host))
                    elif block.place is Place.LEAVING:
                        self._stay(block)
                    elif block.place is Place.DISK and self._spiller is not None:
                        self._spiller.wanted[block] = None
        finally:
            self._copy_back(moves, tensors, stream)
            self.blocks.resident += sum([block.nbytes for block, _ in moves])
            if self._spiller is not None:
                for block, _ in moves:
                    self._spiller.drop(block)
        if self._spiller is not None:
            self._spiller.fetch_wanted(anew=True)

    def reserve(self, wanted: Sequence[Form]) -> list[HostSlot]:
        """Slots of the host tier, one for each form, for which room is made or waited for.

        Raises TierFull.
        """
        while (slots := self._host.find(wanted)) is None:
            nbytes = sum(form.nbytes for form in wanted)
            if not self._host.can_hold(nbytes) or not self._make_room(nbytes):
                return self._host.reserve(wanted)
        return slots

    def drop(self, block: Block) -> None:
        """One saved tensor less needs the block. Without any it is gone, of which `blocks` takes note.

        This may be called within a `__del__`, which is no place to start copies, nor for a policy to raise.
        """
        block.holders -= 1
        if block.holders == 0 and block.place is not Place.GONE:
            self.blocks.ended.append(block.key)
            self.blocks.ended_bytes += block.nbytes
            self.free(block)

    def free(self, block: Block) -> None:
        """Gives up all that a block has. What a copy still uses outlives the copy."""
        if (block.place is Place.LEAVING or block.place is Place.ARRIVING) and block.ticket is not None:
            block.ticket.hold(block.stream, "drop")
        if block.host is not None or block in self._backups or self._spiller is not None:
            self._leave_host(block)
        self._free_device(block)
        if block.place in ON_DEVICE:
            self.blocks.resident -= block.nbytes
        block.place = Place.GONE
        del self.blocks.by_key[block.key]

    def _can_leave(self, block: Block) -> bool:
        tensor = block.tensor
        return (
            tensor is not None
            and block.unchanged()
            and not hasattr(tensor.untyped_storage(), STAYS)
            and self._device.plain_layout(tensor)
        )

    def _make_room(self, nbytes: int) -> bool:
        """Makes or waits for room in the host tier. Whether there may be so much by now."""
        if self._backups:
            oldest = next(iter(self._backups))
            self._give_back(oldest, self._backups.pop(oldest))
            return True
        spiller = self._spiller
        if spiller is not None:
            self._start_offloads()  # what is on its way to the host can go on to the disk
            if spiller.poll():
                return True
            used = self._host.pool_stats().used
            self._relieve(nbytes, spiller)
            if self._host.pool_stats().used < used:
                return True
        if not (self._host.waits or (spiller is not None and spiller.busy)):
            return spiller is not None and spiller.drop_clean(nbytes)
        self._counters.host_waits += 1
        with self._waiting():
            return self._host.wait() or (spiller is not None and spiller.wait())

    def _relieve(self, nbytes: int, spiller: Spiller) -> None:
        """Lets so many bytes of the host tier go down to disk, as the policy says, with what is under way already.

        The same advice again, or about a block that does not exist, is none.
        """
        if self._policy.plans_spills and (self._host.waits or spiller.busy):
            return
        missing = nbytes - spiller.going_down
        if missing > 0 and spiller.accepting:
            spiller.spill_later(missing)
        blocks = self.blocks.by_key
        told: set[Action] = set()
        while (missing := nbytes - spiller.going_down) > 0 and spiller.accepting:
            answer = self._policy.decide(HostPressure(missing))
            advice = dict.fromkeys(actions_of(checked(self._policy, answer)))
            new = [action for action in advice if action not in told and action.key in blocks]
            if not new:
                return
            told.update(new)
            self.release([blocks[action.key] for action in new if isinstance(action, Release)])
            self.spill([blocks[action.key] for action in new if isinstance(action, Spill)])

    def _waiting(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the host waits, of which a trace is told."""
        return self._trace.host_waits() if self._trace is not None else contextlib.nullcontext()

    def _give_slots(self, blocks: Sequence[Block]) -> None:
        """Finds host memory for blocks that leave. Small ones share a lease; who finds no room is left out."""
        try:
            slots = self.reserve([block.form for block in blocks])
        except TierFull as error:
            if len(blocks) == 1:
                self._keep(blocks[0], error)
            else:
                for block in blocks:
                    self._give_slots([block])
            return
        self._moves += zip(blocks, slots, strict=True)

    def _keep(self, block: Block, error: TierFull) -> None:
        if self._counters.kept.count == 0:
            _log.warning("an activation stays on the device: %s. Later ones are only counted", str(error))
        block.no_room = True
        self._counters.kept.add(block.nbytes)

    def _start_offloads(self) -> None:
        """Begins the copies of all that has a slot. The slots go back to the tier where that fails."""
        moves, self._moves = self._moves, []
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

    def _copy_back(
        self, moves: Sequence[tuple[Block, HostSlot]], tensors: list[torch.Tensor], stream: Stream
    ) -> None:
        """Begins copies from host slots, which go back to the tier when the copies have ended.

        tensors: where the bytes go, each in its block's form, allocated on `stream`.
        """
        try:
            filled = [block.ticket for block, _ in moves]
            tickets = self._engine.reload([slot.tensor for _, slot in moves], tensors, stream, filled)
        except BaseException:
            self._engine.synchronize()
            raise
        arriving, by_span = Place.ARRIVING, self.blocks.by_span
        left: dict[Ticket, list[HostSlot]] = {}
        for (block, slot), tensor, ticket in zip(moves, tensors, tickets, strict=True):
            block.tensor = tensor
            block.formed = True
            block.stream = stream
            block.ticket = ticket
            block.host = None
            if block.retained:
                self._backups[block], block.retained = slot, False
            else:
                left.setdefault(ticket, []).append(slot)
            block.versions = [(tensor, tensor._version)]
            block.span = span = storage_id(tensor.untyped_storage()), 0, block.nbytes
            by_span[span] = block  # a backward that makes a graph saves it once more
            block.place = arriving
        for ticket, slots in left.items():
            self._host.release_all(slots, ticket.event)
        self._count(self._counters.reloaded, moves)

    def _count(self, moved: Moved, moves: Sequence[tuple[Block, HostSlot]]) -> None:
        moved.count += len(moves)
        for block, slot in moves:
            moved.nbytes += block.nbytes
            if not slot.lease.slab.pinned:
                self._counters.blocking.add(block.nbytes)

    def _leave_again(self, block: Block) -> None:
        """The host has the bytes of a block that was reloaded, and its ticket is of that reload."""
        block.host = self._backups.pop(block)
        block.place, block.chosen = Place.LEAVING, False

    def _give_back(self, block: Block, slot: HostSlot) -> None:
        """The block does not need the slot any more, which its newest copy may still use."""
        self._host.release(slot, None if block.ticket is None else block.ticket.event)

    def _stay(self, block: Block) -> None:
        """The block is wanted before it was released: it has been on the device all the time."""
        block.unwanted = block.ticket
        self._leave_host(block)
        block.place = Place.DEVICE

    def _leave_host(self, block: Block) -> None:
        """Neither the host bytes are needed any more nor those on disk, though a copy may still use them."""
        if block.host is not None:
            self._give_back(block, block.host)
        if (backup := self._backups.pop(block, None)) is not None:
            self._give_back(block, backup)
        block.retained = False
        if self._spiller is not None:
            self._spiller.drop(block)
        block.host = block.ticket = None

    def _bring_up(self, block: Block, spiller: Spiller) -> None:
        """Reads a block that is needed now: if there is no other way, into memory beyond the limit."""
        if block.move is None:
            size = [block.form]
            try:
                slots = self.reserve(size)
            except TierFull:
                self._counters.overflowed += 1
                slots = self._host.overflow(size)
            spiller.read([block], slots)
        with self._waiting():
            spiller.wait_for(block)

    def _free_device(self, block: Block) -> None:
        if block.unwanted is not None:
            block.unwanted.hold(block.stream, "drop")
        block.unwanted = None
        block.tensor = None
        block.versions.clear()
        by_span = self.blocks.by_span
        if by_span.get(block.span) is block:
            del by_span[block.span]


_key = attrgetter("key")
_ACTIONS = frozenset(get_args(Action))
# The numbers of each kind of advice, and what they are.
_NUMBERS = {action: {"key": "the key of a block"} for action in _ACTIONS} | {
    Recompute: {"layer": "the position of a layer"},
    Keep: {"layer": "the position of a layer", "layers": "the number of layers"},
}
_INT = frozenset({int})


def checked(policy: Policy, answer: object) -> Sequence[Any]:
    """What a policy has answered; None is nothing. Raises PolicyError where that is no sequence of actions."""
    if answer is None:
        return ()
    if type(answer) is Each and answer.kind in _ACTIONS and _INT.issuperset(map(type, answer.keys)):
        return answer
    name = policy.name
    if not isinstance(answer, Iterable):
        raise PolicyError(f"{name} answered {answer!r}, which is no sequence of actions")
    actions = list(answer)
    # Each block that moves comes through here three times: what is right is seen without a loop in Python.
    if _ACTIONS.issuperset(map(type, actions)) and _INT.issuperset(map(type, map(_key, actions))):
        return actions
    for action in actions:
        if type(action) not in _NUMBERS:
            raise PolicyError(f"{name} answered {action!r}, which is not an action")
        for number, what in _NUMBERS[type(action)].items():
            if not isinstance(getattr(action, number), Integral):
                raise PolicyError(f"{name} answered {action!r}: {what} is an int")
        if type(action) is Recompute:
            try:
                one_of("how", action.how, get_args(How))
            except ValueError as error:
                raise PolicyError(f"{name} answered {action!r}: {error}") from None
    return actions


def actions_of(answer: Iterable[Advice]) -> list[Action]:
    """What it advises for blocks."""
    return [action for action in answer if not isinstance(action, OfLayer)]

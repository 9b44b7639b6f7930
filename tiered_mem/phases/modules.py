"""Modules that leave the device for a phase, storage by storage."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch.utils.weak import TensorWeakRef

from ..device.device import Device, Event
from ..device.transfer import TransferEngine
from ..errors import OffloadRefused, TierFull
from ..sizes import format_bytes
from ..tiers.host_tier import Form, HostSlot, HostTier, flat_form, groups
from .gates import Gates
from .held import HeldStorage, held_storages, members
from .placeholder import HostCopy, Parked, away, send_away
from .wrappers import Wrappers

_log = logging.getLogger("tiered_mem.phases")


class ModulePhases:
    """Takes a module's memory to the host and back. One thread at a time.

    What is away is kept by the tensors themselves, and host memory that waits for the next cycle by the storage
    whose bytes it had: either is given back when the memory it is for dies, whoever kept that alive.

    reserve: gives slots of the host tier, for which it makes or waits for room. Raises TierFull.
    """

    def __init__(
        self,
        device: Device,
        host: HostTier,
        engine: TransferEngine,
        reserve: Callable[[Sequence[Form]], list[HostSlot]],
    ) -> None:
        self._device = device
        self._host = host
        self._engine = engine
        self._reserve = reserve
        self._parked: weakref.WeakSet[Parked] = weakref.WeakSet()
        self._copies: weakref.WeakSet[HostCopy] = weakref.WeakSet()
        self._unused: deque[tuple[HostSlot, Event | None]] = deque()
        self._gates = Gates()
        self._closed = False

    def offload(self, module: torch.nn.Module, *, gradients: bool, owner: object) -> None:
        """Copies what of the module is on the device to the host, waits, and frees the device memory.

        owner: kept alive for as long as something is away.

        Raises OffloadRefused and TierFull, before anything has changed.
        """
        wrappers = Wrappers(module)
        self._away(module, wrappers)  # whether another manager has a part of it
        with torch.inference_mode(False), torch.no_grad():
            wrappers.check(gradients=gradients)
            moves = self._with_room(held_storages(module, wrappers, self._device, gradients=gradients))
            if moves:
                wrappers.reshard()
                self._copy(moves)
                self._gates.shut(wrappers.modules)
            for held, copy in moves:
                self._park(held, copy, type(module).__name__, owner)

    def reload(self, module: torch.nn.Module) -> None:
        """Brings back what of the module is away, ready for work that is issued now on the current stream.

        Raises torch.OutOfMemoryError; then all of it stays away.
        """
        with torch.inference_mode(False), torch.no_grad():
            self._bring(self._away(module, Wrappers(module)))

    def close(self) -> None:
        """Brings back what the device has room for. What stays away is copied to memory that is not pinned."""
        self._closed = True
        left = []
        with torch.inference_mode(False), torch.no_grad():
            for parked in [parked for parked in self._parked if not parked.orphaned]:
                try:
                    self._bring([parked])
                except torch.OutOfMemoryError:
                    left.append(parked)
            for parked in left:
                parked.orphaned = True
                pinned = parked.copy.slot
                slot = self._host.overflow([flat_form(pinned.tensor.nbytes, pinned.tensor.dtype)])[0]
                slot.tensor.copy_(pinned.tensor)
                self._host.release(pinned, None)
                parked.copy.slot = slot
        if left:
            size = format_bytes(sum(parked.copy.slot.tensor.nbytes for parked in left))
            _log.error("the manager is closed, and the device has no room for %s that were offloaded", size)
        for copy in set(self._copies) - {parked.copy for parked in self._parked}:
            copy.drop()
        self.free()

    def free(self) -> None:
        """Frees the host memory of what has died."""
        while self._unused:
            self._host.release(*self._unused.popleft())

    def stats(self) -> dict[str, int]:
        """What is away, and the host memory that is kept for that and for the next time."""
        parked = list(self._parked)
        return {
            "parked.storages.current": len(parked),
            "parked.bytes.current": sum(each.copy.slot.tensor.nbytes for each in parked),
            "parked.host_bytes.current": sum(copy.slot.tensor.nbytes for copy in self._copies if not copy.dropped),
        }

    def _away(self, module: torch.nn.Module, wrappers: Wrappers) -> list[Parked]:
        """What of the module is away, gradients that it has dropped meanwhile among it."""
        tensors = [member.tensor for member in members(module, wrappers, gradients=True)]
        found = dict.fromkeys(known.parked for tensor in tensors if (known := away(tensor)) is not None)
        if not self._parked.issuperset(found):
            raise OffloadRefused("a part of the module was offloaded by another manager: call reload() of that")
        ids = set(map(id, tensors))
        gradients = (each for each in self._parked if each.parameter is not None and id(each.parameter()) in ids)
        return list(found | dict.fromkeys(gradients))

    def _with_room(self, held: Sequence[HeldStorage]) -> list[tuple[HeldStorage, HostCopy]]:
        """Each with host memory of its size: what it had the last time, or new one."""
        copies = {each: copy for each in held if (copy := self._kept(each)) is not None}
        missing = [each for each in held if each not in copies]
        nbytes = sum(each.nbytes for each in missing)
        new: list[HostSlot] = []
        try:
            if not self._host.can_hold(nbytes):
                raise self._full(nbytes)
            for group in groups(missing):
                new += self._reserve([flat_form(each.nbytes, each.dtype) for each in group])
        except BaseException as error:
            for slot in new:
                self._host.release(slot, None)
            if isinstance(error, TierFull):
                raise self._full(nbytes) from None
            raise
        for each, slot in zip(missing, new, strict=True):
            copies[each] = HostCopy(slot, self._unused)
            self._copies.add(copies[each])
        return [(each, copies[each]) for each in held]

    def _full(self, nbytes: int) -> TierFull:
        used, most = self._host.usage()
        capacity = used if most is None else most
        return TierFull(
            "host",
            needed=nbytes,
            free=capacity - used,
            used=used,
            limit=capacity,
            advice="nothing was offloaded. Raise host_bytes, or let go of modules that were offloaded before",
        )

    def _kept(self, held: HeldStorage) -> HostCopy | None:
        """The host memory that it had the last time, if that is this manager's and fits."""
        copies, place = held.kept()
        copy = copies.get(place)
        if copy is None or copy not in self._copies or copy.dropped:
            return None
        fits = copy.slot.tensor.nbytes == held.nbytes and copy.slot.tensor.dtype is held.dtype
        return copy if fits else None

    def _copy(self, moves: Sequence[tuple[HeldStorage, HostCopy]]) -> None:
        stream = self._device.current_stream()
        try:
            # The last reload read the host memory, maybe on behalf of another stream. Most have the same one.
            for event in {id(copy.event): copy.event for _, copy in moves}.values():
                if event is not None:
                    self._device.wait_for(event)
            of, to = [held.flat() for held, _ in moves], [copy.slot.tensor for _, copy in moves]
            ticket = self._engine.offload(of, to, [stream])
            ticket.wait()
        except BaseException:
            self._engine.synchronize()
            raise

    def _park(self, held: HeldStorage, copy: HostCopy, module: str, owner: object) -> None:
        copies, place = held.kept()
        copies[place] = copy
        parameter = held.members[0].parameter
        of = None if parameter is None else TensorWeakRef(parameter)
        going = [(member.name, tensor) for member in held.members for tensor in member.tensors()]
        tensors = [TensorWeakRef(tensor) for _, tensor in going]
        parked = Parked(copy, tensors, dict(vars(held.storage)), owner, of)
        copy.event = None
        self._parked.add(parked)
        for name, tensor in going:
            send_away(tensor, f"{name} of {module}", parked)

    def _bring(self, parked: Sequence[Parked]) -> None:
        stream = self._device.current_stream()
        of = [each.copy.slot.tensor for each in parked]
        to: list[torch.Tensor] = []
        try:
            to.extend(self._device.empty(host.nbytes, host.dtype) for host in of)
            tickets = self._engine.reload(of, to, stream, [None] * len(of))
        except BaseException as error:
            if not isinstance(error, torch.OutOfMemoryError):
                self._engine.synchronize()  # some copies may have been started
            to.clear()
            raise
        for each, tensor, ticket in zip(parked, to, tickets, strict=True):
            ticket.hold(stream, "reload")
            each.copy.event = tickets[-1].event  # they end in this order, and to wait once costs less
            each.restore(tensor)
            if self._closed:
                each.copy.drop()
        self._gates.open()

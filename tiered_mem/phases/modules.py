"""Modules that leave the device for a phase, storage by storage."""

from __future__ import annotations

import logging
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils.weak import TensorWeakRef

from ..device.device import Device, Event
from ..device.torch_private import storage_id, storage_uses, tensor_uses
from ..device.transfer import TransferEngine
from ..errors import OffloadRefused, TierFull
from ..sizes import format_bytes
from ..tiers.host_tier import Form, HostSlot, HostTier, flat_form, groups
from .placeholder import HostCopy, Parked, away, can_go, send_away

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
        self._closed = False

    def offload(self, module: torch.nn.Module, *, gradients: bool, owner: object) -> None:
        """Copies what of the module is on the device to the host, waits, and frees the device memory.

        owner: kept alive for as long as something is away.

        Raises OffloadRefused and TierFull, before anything has changed.
        """
        self._away(module)  # whether another manager has a part of it
        with torch.inference_mode(False), torch.no_grad():
            moves = self._with_room(held_storages(module, self._device, gradients=gradients))
            if moves:
                self._copy(moves)
            for held, copy in moves:
                self._park(held, copy, type(module).__name__, owner)

    def reload(self, module: torch.nn.Module) -> None:
        """Brings back what of the module is away, ready for work that is issued now on the current stream.

        Raises torch.OutOfMemoryError; then all of it stays away.
        """
        with torch.inference_mode(False), torch.no_grad():
            self._bring(self._away(module))

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

    def _away(self, module: torch.nn.Module) -> list[Parked]:
        """What of the module is away, gradients that it has dropped meanwhile among it."""
        tensors = [member.tensor for member in members(module, gradients=True)]
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
        stats = self._host.pool_stats()
        capacity = stats.used if stats.capacity is None else stats.capacity
        return TierFull(
            "host",
            needed=nbytes,
            free=capacity - stats.used,
            used=stats.used,
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
            for _, copy in moves:
                if copy.event is not None:
                    self._device.wait_for(copy.event)  # the last reload read it, maybe on behalf of another stream
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
        tensors = [TensorWeakRef(member.tensor) for member in held.members]
        parked = Parked(copy, tensors, dict(vars(held.storage)), owner, of)
        copy.event = None
        self._parked.add(parked)
        for member in held.members:
            send_away(member.tensor, f"{member.name} of {module}", parked)

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
            each.copy.event = ticket.event
            each.restore(tensor)
            if self._closed:
                each.copy.drop()


# Where the host memory of a storage waits for the next cycle: on the storage. New gradients come with new storages,
# so that theirs waits on the parameter's.
_COPIES = "_tiered_mem_copies"


@dataclass(slots=True, eq=False)
class ModuleTensor:
    """A tensor of a module. parameter: the parameter whose gradient it is."""

    name: str
    tensor: torch.Tensor
    parameter: torch.Tensor | None = None


class HeldStorage:
    """A storage, and the module's tensors in it: tied ones, or views of one flat buffer.

    carrier: the tensor in whose elements the bytes are counted. Trailing bytes short of an element are ignored.
    """

    def __init__(self, members: list[ModuleTensor]) -> None:
        self.storage = members[0].tensor.untyped_storage()
        self.members = members
        self.carrier = min((member.tensor for member in members), key=lambda tensor: tensor.itemsize)
        self.dtype = self.carrier.dtype
        self.nbytes = self.storage.nbytes() // self.dtype.itemsize * self.dtype.itemsize

    def uses(self) -> int:
        """The number of torch's references to the storage."""
        return storage_uses(storage_id(self.storage))

    def flat(self) -> torch.Tensor:
        """The whole storage as a 1-dimensional tensor."""
        return self.carrier.detach().as_strided((self.nbytes // self.dtype.itemsize,), (1,), 0)

    def kept(self) -> tuple[dict[int, HostCopy], int]:
        """Where host memory waits for the storage's next cycle, or for a gradient in its place; and its key there.

        The key is -1, and a gradient's is the offset of its parameter.
        """
        parameter = self.members[0].parameter
        if parameter is None:
            attributes, place = vars(self.storage), -1
        elif (known := away(parameter)) is not None:
            attributes, place = known.parked.marks, known.offset
        else:
            attributes, place = vars(parameter.untyped_storage()), int(parameter.storage_offset())
        copies: dict[int, HostCopy] = attributes.setdefault(_COPIES, {})
        return copies, place


def members(module: torch.nn.Module, *, gradients: bool) -> Iterator[ModuleTensor]:
    """The module's parameters, buffers and gradients; each tensor once."""
    for name, parameter in module.named_parameters():
        yield ModuleTensor(name, parameter)
        if gradients and parameter.grad is not None:
            yield ModuleTensor(f"{name}.grad", parameter.grad, parameter)
    for name, buffer in module.named_buffers():
        yield ModuleTensor(name, buffer)


def held_storages(module: torch.nn.Module, device: Device, *, gradients: bool) -> list[HeldStorage]:
    """The module's storages that are on the device now. Raises OffloadRefused where a tensor has to stay there."""
    found = [member for member in members(module, gradients=gradients) if _moves(member.tensor, device)]
    present = {id(member.tensor): member for member in found}
    for member in found:
        _check(member, device)
        base = member.tensor._base
        if base is not None and id(base) not in present:
            present[id(base)] = ModuleTensor(f"{member.name}._base", base)
            _check(present[id(base)], device)
    together: dict[int, list[ModuleTensor]] = {}
    for member in present.values():
        together.setdefault(storage_id(member.tensor.untyped_storage()), []).append(member)
    held = [HeldStorage(lying) for lying in together.values()]
    _check_uses(held, present, device)
    return held


def _moves(tensor: torch.Tensor, device: Device) -> bool:
    # A wrapper's own memory is none, so that it is not asked of a tensor whose type is not known.
    return (
        away(tensor) is None
        and device.owns(tensor)
        and not (can_go(tensor) and tensor.layout is torch.strided and tensor.untyped_storage().nbytes() == 0)
    )


def _check(member: ModuleTensor, device: Device) -> None:
    tensor = member.tensor
    if not can_go(tensor):
        reason = f"it is a {type(tensor).__qualname__}, and only plain tensors and parameters can leave"
    elif tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        reason = "it is sparse, quantized or nested, and only dense tensors can leave"
    elif tensor.is_conj() or tensor.is_neg():
        reason = "it is a conjugate or negative view; resolve_conj() and resolve_neg() make a tensor of it"
    elif tensor.grad_fn is not None:
        reason = "autograd computed it, and its graph would be lost; detach() it"
    elif not device.plain_layout(tensor):
        reason = "it is in a private format of the NPU; torch_npu.npu_format_cast(tensor, 2) makes it a plain one"
    else:
        return
    raise OffloadRefused(f"{member.name} cannot be offloaded: {reason}")


def _check_uses(held: Iterable[HeldStorage], present: Mapping[int, ModuleTensor], device: Device) -> None:
    """Refuses storages that others use too: their memory would not come free, nor would others see it come back."""
    # What torch counts for an object of ours by itself is found by looking at one.
    alone = HeldStorage([ModuleTensor("", torch.empty(1, device=device.torch_device))])
    per_storage = alone.uses() - 1
    per_tensor = _uses(alone.carrier)
    views = Counter(id(member.tensor._base) for member in present.values())
    for each in held:
        others = each.uses() - per_storage - len(each.members)
        if others > 0:
            raise _shared(each.members[0], f"{others} tensors that are not of the module use its memory")
        for member in each.members:
            known = per_tensor + views[id(member.tensor)] + (member.parameter is not None)
            if _uses(member.tensor) > known:
                raise _shared(member, "something that is not of the module holds it")


def _uses(tensor: torch.Tensor) -> int:
    """The number of torch's references to the tensor, without the node that adds to its gradient."""
    if not tensor.requires_grad or tensor.is_inference():
        return tensor_uses(tensor)
    # The node may live or not, and it holds the tensor once. Here it lives.
    with torch.inference_mode(False):
        edge = get_gradient_edge(tensor)
    uses = tensor_uses(tensor) - 1
    del edge
    return uses


def _shared(member: ModuleTensor, found: str) -> OffloadRefused:
    return OffloadRefused(
        f"{member.name} cannot be offloaded: {found}, such as a view, a flat buffer, a wrapper like "
        "DistributedDataParallel, or the graph of a forward whose backward has not run. Let go of it first"
    )

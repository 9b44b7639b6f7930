"""Host memory in slots, the forms of the tensors over them, and how torch sees the slabs that they are cut from."""

from __future__ import annotations

import ctypes
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import torch

from ..allocators.base import ALIGNMENT, HostPool, OutOfHostMemory, PoolStats, Region
from ..device.device import Device, Event
from ..errors import DeviceFailed, TierFull
from ..ground.stats import Stats

_log = logging.getLogger("tiered_mem.host_tier")


@dataclass(slots=True, eq=False)
class HostSlot:
    """Host bytes as a contiguous tensor over a part of a lease."""

    tensor: torch.Tensor
    lease: Lease

    @property
    def pinned(self) -> bool:
        """Whether torch copies to and from it without making the host wait."""
        return self.lease.slab.pinned


@dataclass(slots=True, eq=False)
class Lease:
    """A region of the pool, the slab it lies in, and how many slots and file operations use it.

    A slab that is not of the pool is memory of the lease's own, beyond the tier's limit.
    """

    region: Region
    slab: HostSlab
    users: int


class HostTier:
    """A pool of host memory.

    A slot that a copy may still use is given back with that copy's event, and handed out again when the event has
    come to pass. The pool itself knows nothing of streams.

    device: that of the copies.
    steps_in_flight: in how many steps slots may be given back before the first of them is waited for. The host runs
        ahead of the device, and would take new slots for each step otherwise.
    owned: the pool is closed with the tier.
    node: what the manager has of that which the ranks of the machine share. It is left when the tier is closed.
    """

    def __init__(
        self,
        pool: HostPool,
        device: Device,
        *,
        steps_in_flight: int = 2,
        owned: bool = True,
        node: Neighbours | None = None,
    ) -> None:
        self._pool = pool
        self._node = node
        self._steps_in_flight = steps_in_flight
        self._step = 0
        self._device = device
        self._owned = owned
        self._slabs: dict[int, HostSlab] = {}
        # Of each lease: the event that slots are free at, the step in which they were given back, and how many.
        self._returning: deque[tuple[Lease, Event, int, int]] = deque()
        self._leases: set[Lease] = set()
        self._slots = 0

    def reserve(self, wanted: Sequence[Form], advice: str = "") -> list[HostSlot]:
        """A slot for each of the forms, next to each other: memory that is free again when all are back.

        advice: what helps where the tier is full, other than for activations.

        Raises TierFull.
        """
        try:
            return self._allocate(wanted)
        except OutOfHostMemory as error:
            raise self._full(error, advice) from error

    def find(self, wanted: Sequence[Form]) -> list[HostSlot] | None:
        """As `reserve`; None where there is no room now."""
        try:
            return self._allocate(wanted)
        except OutOfHostMemory:
            return None

    def can_hold(self, nbytes: int) -> bool:
        """Whether so many bytes fit when nothing else is there."""
        capacity = self._pool.stats().capacity
        return capacity is None or nbytes <= capacity

    def overflow(self, wanted: Sequence[Form]) -> list[HostSlot]:
        """Slots beyond the tier's limit, in memory that is not pinned: for bytes that are needed now."""
        nbytes = room_for(wanted)
        with torch.inference_mode(False):
            memory = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8)
        start = -memory.data_ptr() % ALIGNMENT
        whole = memory[start : start + nbytes]
        region = Region(whole.data_ptr(), nbytes)
        return self._slots_in(region, HostSlab(region, whole), wanted)

    def hold(self, slot: HostSlot) -> Lease:
        """Keeps the slot's memory, whoever releases the slot, until the lease is given back by `free`."""
        slot.lease.users += 1
        return slot.lease

    def free(self, lease: Lease) -> None:
        """Whoever held the lease does so no more."""
        if lease not in self._leases:
            return  # dropped with the tier
        lease.users -= 1
        if lease.users == 0:
            self._leases.remove(lease)
            if lease.slab.pooled:
                self._pool.deallocate(lease.region)

    def begin_step(self) -> None:
        """What is given back from now on is of another step. Other ranks may get what is not used here."""
        self._step += 1
        if self._node is not None:
            self._node.begin_step()

    @property
    def overdue(self) -> bool:
        """Whether a slot is still on its way back that was given back too many steps ago. Does not wait."""
        self.poll()
        return bool(self._returning) and self._returning[0][2] <= self._step - self._steps_in_flight

    @property
    def waits(self) -> bool:
        """Whether slots are on their way back."""
        return bool(self._returning)

    def wait(self) -> bool:
        """Waits for the copy that has kept a slot the longest. False if there is none. Raises DeviceFailed."""
        if not self._returning:
            return False
        self._device.wait_for(self._returning[0][1])
        self.poll()
        return True

    def release(self, slot: HostSlot, event: Event | None) -> None:
        """Gives a slot back; `event` is the end of the last copy that uses it, None if there is none."""
        if event is None:
            self._free(slot.lease, 1)
        else:
            self._returning.append((slot.lease, event, self._step, 1))

    def release_all(self, slots: Iterable[HostSlot], event: Event) -> None:
        """Gives slots back that one copy was the last to use."""
        slots_of: dict[Lease, int] = {}
        for slot in slots:
            slots_of[slot.lease] = slots_of.get(slot.lease, 0) + 1
        self._returning += [(lease, event, self._step, number) for lease, number in slots_of.items()]

    def poll(self) -> None:
        """Takes back the slots whose copies have ended. Does not wait."""
        passed = None
        while self._returning:
            lease, event, _, slots = self._returning[0]
            if event is not passed and not event.query():
                return
            passed = event
            self._returning.popleft()
            self._free(lease, slots)

    @property
    def slots(self) -> int:
        """Slots in use, those that are on their way back among them."""
        return self._slots

    def pool_stats(self) -> PoolStats:
        return self._pool.stats()

    def counted_on(self) -> int | None:
        """The bytes that the tier may hold, as it looks now: less than its limit where ranks share. None is any."""
        return self.usage()[1]

    def usage(self) -> tuple[int, int | None]:
        """The bytes of regions, and `counted_on`."""
        stats = self._pool.stats()
        limits = [stats.capacity, None if self._node is None else self._node.counted_on()]
        return stats.used, min((limit for limit in limits if limit is not None), default=None)

    def shared_stats(self) -> Stats:
        """What is known of the other managers of the machine."""
        return {} if self._node is None else self._node.stats()

    def close(self) -> None:
        """Frees the memory, once every copy that was started has ended.

        Raises RuntimeError on live slots, and DeviceFailed where a copy has not been made: after a failure
        torch_npu's queue drops what comes next, and an event in it neither passes nor can be waited for.
        """
        self.poll()
        if self._returning:
            copies = sum(slots for *_, slots in self._returning)
            raise DeviceFailed(
                f"{copies} copies of host memory were dropped, because work before them failed on the device. The "
                "error of that work says why; the process has to be started again"
            )
        self._slabs.clear()
        if self._owned:
            self._pool.close()
        if self._node is not None:
            self._node.leave()

    def drop(self) -> None:
        """Frees the memory whatever slots are in use. For when nobody can use them any more, and no copy does."""
        self._returning.clear()
        for lease in self._leases:
            if lease.slab.pooled:
                self._pool.deallocate(lease.region)
        self._leases.clear()
        self._slots = 0
        self.close()

    def _allocate(self, wanted: Sequence[Form]) -> list[HostSlot]:
        self.poll()
        region = self._pool.allocate(room_for(wanted))
        return self._slots_in(region, self._slab_of(region), wanted)

    def _free(self, lease: Lease, slots: int) -> None:
        if lease in self._leases:
            self._slots -= slots
            lease.users -= slots - 1
            self.free(lease)

    def _slots_in(self, region: Region, slab: HostSlab, wanted: Sequence[Form]) -> list[HostSlot]:
        lease = Lease(region, slab, len(wanted))
        self._leases.add(lease)
        self._slots += len(wanted)
        return [HostSlot(tensor, lease) for tensor in slab.cut(region.ptr - slab.region.ptr, wanted)]

    def _slab_of(self, region: Region) -> HostSlab:
        found = self._pool.slab(region)
        known = self._slabs.get(found.ptr)
        # The pool may have given a slab back and got another one at the same address.
        if known is None or known.region is not found:
            known = self._slabs[found.ptr] = HostSlab(found)
        return known

    def _full(self, error: OutOfHostMemory, advice: str) -> TierFull:
        cause = error.__cause__
        if self._node is not None and isinstance(cause, OutOfHostMemory) and cause.free is not None:
            return self._node.full(error.needed, error.used)  # what others have is missing here
        limit = error.used if error.limit is None else error.limit
        never = error.needed > limit
        return TierFull(
            "host",
            needed=error.needed,
            free=limit - error.used,
            used=error.used,
            limit=limit,
            advice=advice
            or ("it can never fit: raise host_bytes" if never else "raise host_bytes or offload fewer layers"),
        )


class Neighbours(Protocol):
    """The other managers of the machine that take of the same host memory, as a tier sees them."""

    def begin_step(self) -> None:
        """Give them what they want and this manager does not use."""

    def counted_on(self) -> int | None:
        """The bytes that they leave to this manager. None is any."""

    def full(self, needed: int, used: int) -> TierFull:
        """The error where they leave less."""

    def stats(self) -> Stats:
        """Names and numbers of what is shared."""

    def leave(self) -> None:
        """Take of it no more."""


class HostSlab:
    """A slab of the pool as torch sees it.

    memory: that of a slab which is not of the pool, and lives as long as this.
    """

    def __init__(self, region: Region, memory: torch.Tensor | None = None) -> None:
        self.region = region
        self.pooled = memory is None
        # One storage for the whole slab: torch looks at where a storage starts to tell whether it is pinned.
        whole = bytes_of(region) if memory is None else memory
        self.pinned = memory is None and is_pinned(whole)
        self._elements = {torch.uint8: whole}
        self._cuts: dict[int, tuple[Sequence[Form], list[torch.Tensor]]] = {}  # by their start

    def cut(self, start: int, wanted: Sequence[Form]) -> list[torch.Tensor]:
        """Tensors of these forms side by side, each in whole units of the pool's, from the byte `start` on.

        They may be those of an earlier call: each step of a training asks for much the same.
        """
        known = self._cuts.get(start)
        if known is not None and known[0] == wanted:
            return known[1]
        tensors = []
        last: torch.dtype | None = None
        end = start
        for nbytes, dtype, shape, stride in wanted:
            if dtype is not last:
                last, elements = dtype, self._of(dtype)
                first = elements.storage_offset()  # from which as_strided does not count
            tensors.append(elements.as_strided(shape, stride, first + end // dtype.itemsize))
            end += -(-nbytes // ALIGNMENT) * ALIGNMENT
        if len(self._cuts) >= _MOST_CUTS:
            self._cuts.clear()
        self._cuts[start] = wanted, tensors
        return tensors

    def _of(self, dtype: torch.dtype) -> torch.Tensor:
        """The slab's bytes as a 1-dimensional tensor."""
        known = self._elements.get(dtype)
        if known is None:
            whole = self._elements[torch.uint8]
            with torch.inference_mode(False):
                known = whole[: len(whole) // dtype.itemsize * dtype.itemsize].view(dtype)
            self._elements[dtype] = known
        return known


# A step of a large model cuts some hundred times; of one with changing shapes little comes again.
_MOST_CUTS = 1024


class Form(NamedTuple):
    """How a tensor lies in memory; `stride` is in elements. Bytes are copied as a contiguous one, on both sides."""

    nbytes: int
    dtype: torch.dtype
    shape: Sequence[int]
    stride: Sequence[int]


def flat_form(nbytes: int, dtype: torch.dtype = torch.uint8) -> Form:
    """The bytes as a 1-dimensional tensor."""
    return Form(nbytes, dtype, (nbytes // dtype.itemsize,), (1,))


def room_for(wanted: Sequence[Form]) -> int:
    """The bytes of slots next to each other, each in whole units of the pool's."""
    return sum([-(-size // ALIGNMENT) for size, *_ in wanted]) * ALIGNMENT


def bytes_of(region: Region) -> torch.Tensor:
    """The region as a 1-dimensional uint8 tensor. It does not keep the region alive."""
    with torch.inference_mode(False):  # later copies to it may be made outside of the mode
        return torch.frombuffer((ctypes.c_char * region.nbytes).from_address(region.ptr), dtype=torch.uint8)


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether torch takes the memory for pinned. Where it cannot tell, its copies do not rely on it either."""
    try:
        return tensor.is_pinned()
    except RuntimeError as error:
        _log.warning("torch cannot tell whether host memory is pinned, and it counts as not pinned: %s", str(error))
        return False


# Blocks that leave together come back at about the same time. Above this size a block is worth a region and a file
# of its own.
_TOGETHER_BYTES = 8 << 20


class _HasBytes(Protocol):
    @property
    def nbytes(self) -> int: ...


_Sized = TypeVar("_Sized", bound=_HasBytes)


def groups(blocks: Sequence[_Sized]) -> Iterator[list[_Sized]]:
    """The blocks, or what else has a size, in order, cut where they would pass 8 MiB."""
    group: list[_Sized] = []
    nbytes = 0
    for block in blocks:
        if group and nbytes + block.nbytes > _TOGETHER_BYTES:
            yield group
            group, nbytes = [], 0
        group.append(block)
        nbytes += block.nbytes
    if group:
        yield group

"""What residences of optimizer states rest in, and a step's way of using them."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from tests.spill.declared_files import DeclaredFiles
from tests.spill.disks import Clock
from tests.spill.faulty_files import FaultyFiles
from tiered_mem.allocators import HostPool, PoolStats, Region
from tiered_mem.allocators.base import round_up
from tiered_mem.device.device import Device
from tiered_mem.device.transfer import Ticket, TransferEngine
from tiered_mem.optimizer.bucket import Residence
from tiered_mem.spill.disk_tier import DiskTier
from tiered_mem.tiers.host_tier import HostSlot, HostTier
from tiered_mem.tiers.pinning import chosen_pool
from tiered_mem.tiers.shelf import FixedSlots, ParcelState, Shelf

NBYTES = 200_001  # no multiple of anything
SLOT = round_up(NBYTES)
RECORD = SLOT + 4096
MIB = 1 << 20


class DeclaredFaults(FaultyFiles):
    """Files with faults, of which the race detector is told."""

    def __init__(self) -> None:
        super().__init__()
        self._files = DeclaredFiles()


class Guard:
    """A lock that fails where it cannot be had."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        assert self._lock.acquire(timeout=60), "taken twice, or held while something waits"

    def __exit__(self, *error: object) -> None:
        self._lock.release()


class GuardedPool:
    """A pool that is used inside `lock` only, as it is said of the host tier."""

    def __init__(self, pool: HostPool, lock: threading.Lock) -> None:
        self._pool = pool
        self._lock = lock
        self.slab, self.trim, self.stats = pool.slab, pool.trim, pool.stats

    def allocate(self, nbytes: int) -> Region:
        assert self._lock.locked()
        return self._pool.allocate(nbytes)

    def deallocate(self, region: Region) -> None:
        assert self._lock.locked()
        self._pool.deallocate(region)

    def close(self) -> None:
        self._pool.close()


class Rig:
    """The tiers, an engine, and residences of all kinds, of which nothing may be left at the end.

    host_slots: what the host tier has room for. slots: those of the shelf before the disk, which is built for the
    first residence that needs it.
    """

    def __init__(
        self, device: str, folder: Path, *, host_slots: int, slots: int, capacity: int, budget: int | None
    ) -> None:
        self.device = Device(device)
        self.engine = TransferEngine(self.device)
        self.lock = threading.Lock()
        self.exclusive = Guard(self.lock)
        _, pool = chosen_pool(self.device, host_slots * SLOT, True, preallocate=False)
        self.pool = GuardedPool(pool, self.lock)
        self.host = HostTier(self.pool, self.device)
        self.files = DeclaredFaults()
        self.clock = Clock()
        self.folder = folder
        self.disk = DiskTier(
            folder, capacity=capacity, write_budget=budget, workers=1, files=self.files, clock=self.clock
        )
        self._slots = slots
        self._shelf: Shelf | None = None
        self._residences: list[Residence] = []
        self._disk_is_closed = False

    @property
    def shelf(self) -> Shelf:
        """The one before the disk. It ends with its last residence."""
        if self._shelf is None or not self._shelf.slots.count:
            self._shelf = Shelf(self._set_aside(self._slots), self.disk, "optimizer")
        return self._shelf

    def on_host(self) -> Residence:
        return self._residence(Shelf(self._set_aside(1), None, "optimizer"))

    def on_disk(self) -> Residence:
        return self._residence(self.shelf)

    def _residence(self, shelf: Shelf) -> Residence:
        self._residences.append(residence := Residence(shelf, NBYTES, f"bucket.{len(self._residences)}"))
        return residence

    def _set_aside(self, slots: int) -> FixedSlots:
        return FixedSlots(self.host, self.exclusive, NBYTES, slots, f"{slots} slots are for optimizer states")

    def make(self, kind: str) -> Residence:
        return self.on_host() if kind == "host" else self.on_disk()

    def buckets(self, count: int) -> list[Residence]:
        """Residences with bytes 0, 1, ... that are on disk."""
        buckets = [self.on_disk() for _ in range(count)]
        for seed, bucket in enumerate(buckets):
            self.fill(bucket, seed)
        self.settle()
        return buckets

    def progress(self) -> None:
        if self._shelf is not None:
            self._shelf.poll()

    def settle(self) -> None:
        """Waits until every bucket that was left is on disk, or the disk has not taken it."""
        self.shelf.poll()
        while self.shelf.wait():
            pass

    def drain(self) -> None:
        """Waits until no file operation is under way."""
        self.settle()
        for residence in self._residences:
            while residence._parcel.state is ParcelState.COMING and not residence.ready:
                residence._parcel.read.wait()

    # The steps of a step.

    def fill(self, residence: Residence, seed: int) -> Ticket:
        """The bytes are those of `seed` from now on, without a look at those before."""
        source = content(seed).to(self.device.torch_device)
        return self._send(residence, source, residence.take(blank=True))

    def look(self, residence: Residence) -> torch.Tensor:
        """The bytes on the device. They may still be on their way."""
        slot = residence.take()
        read, ticket = self._fetch(residence, slot)
        residence.leave(None, ticket)
        return read

    def step(self, residence: Residence) -> torch.Tensor:
        """Adds 1 to every byte on the device. The bytes from before."""
        slot = residence.take()
        before, _ = self._fetch(residence, slot)
        self._send(residence, before + 1, slot)
        return before

    def has(self, residence: Residence, seed: int, steps: int = 0) -> bool:
        return torch.equal(self.look(residence).cpu(), content(seed) + steps)

    def in_use(self) -> int:
        """Bytes of the host tier."""
        with self.exclusive:
            self.host.poll()
        return self.stats().used

    def stats(self) -> PoolStats:
        return self.pool.stats()

    def close_disk(self) -> None:
        """Before anything else is. Its records go with it, and not one by one."""
        self._disk_is_closed = True
        self.disk.close()

    def close(self) -> None:
        self.files.heal()
        for residence in self._residences:
            residence.drop()
        assert self._shelf is None or self._shelf.slots.count == 0
        self.engine.synchronize()
        with self.exclusive:
            self.host.poll()
        assert self.host.slots == 0
        self.host.close()
        assert self._disk_is_closed or self.disk.stats().records == 0
        self.disk.close()

    def _fetch(self, residence: Residence, slot: HostSlot) -> tuple[torch.Tensor, Ticket]:
        to, stream = self._empty(), self.device.current_stream()
        (ticket,) = self.engine.reload([slot.tensor], [to], stream, [residence.ticket])
        ticket.hold(stream)
        return to, ticket

    def _send(self, residence: Residence, source: torch.Tensor, slot: HostSlot) -> Ticket:
        stream = self.device.current_stream()
        ticket = self.engine.offload([source], [slot.tensor], [stream])
        ticket.hold(stream)
        residence.leave(ticket)
        return ticket

    def _empty(self) -> torch.Tensor:
        return torch.empty(NBYTES, dtype=torch.uint8, device=self.device.torch_device)


def content(seed: int) -> torch.Tensor:
    """Bytes on the cpu, others for each seed."""
    return torch.randint(256, (NBYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))

"""The tiers that a manager's arguments ask for."""

from __future__ import annotations

import os

from .allocators import HostPool
from .device import Device
from .host_budget import HostBytes, host_budget, local_processes
from .host_limit import host_limit, memlock_limit
from .host_memory import check_pin, pool_for
from .host_tier import HostTier
from .sizes import parse_bytes
from .spill.disk_tier import DiskTier


def host_tier(
    device: Device,
    host_bytes: HostBytes,
    pin: bool | str,
    preallocate: bool | None,
    host_pool: HostPool | None,
    steps_in_flight: int,
) -> HostTier:
    """Arguments and errors are those of TieringManager."""
    if not isinstance(steps_in_flight, int) or steps_in_flight < 1:
        raise ValueError(f"steps_in_flight is {steps_in_flight!r}; it has to be 1 or more")
    if host_pool is not None:
        if (host_bytes, pin, preallocate) != (None, True, None):
            raise ValueError("host_pool comes in place of host_bytes, pin and preallocate: give either it or these")
        return HostTier(host_pool, device, steps_in_flight=steps_in_flight, owned=False)
    check_pin(pin)
    limits = [host_limit(), memlock_limit() if pin == "locked" else None]
    capacity = host_budget(host_bytes, limits=[each for each in limits if each], processes=local_processes())
    if preallocate is None:
        preallocate = host_bytes not in (None, "auto")
    pool = pool_for(device, capacity, pin, preallocate=preallocate)
    return HostTier(pool, device, steps_in_flight=steps_in_flight)


def disk_tier(
    spill_dir: str | os.PathLike[str] | None,
    spill_bytes: int | str | None,
    spill_write_budget: int | str | None,
    spill_checksum: str | None,
    disk: DiskTier | None,
) -> DiskTier | None:
    """Arguments and errors are those of TieringManager."""
    described = (spill_dir, spill_bytes, spill_write_budget, spill_checksum) != (None, None, None, None)
    if disk is not None:
        if described:
            raise ValueError("disk comes in place of the arguments that begin with spill: give either it or these")
        return disk
    if spill_dir is None:
        if described:
            raise ValueError("what begins with spill describes a disk tier, which needs a spill_dir as well")
        return None
    return DiskTier(
        spill_dir,
        capacity=None if spill_bytes is None else parse_bytes(spill_bytes),
        write_budget=None if spill_write_budget is None else parse_bytes(spill_write_budget),
        checksum=spill_checksum,
    )

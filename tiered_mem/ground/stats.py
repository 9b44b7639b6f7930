"""What a manager counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

# Counts and bytes; a name for what is one, and a float for a share.
Stats = dict[str, int | float | str]

# Why a saved tensor stays on the device.
Reason = Literal["small", "outside", "other_device", "kind", "marked", "no_room", "policy"]
REASONS: tuple[Reason, ...] = get_args(Reason)


@dataclass(slots=True)
class Moved:
    """A number of things and their bytes, since the manager was made."""

    count: int = 0
    nbytes: int = 0

    def add(self, nbytes: int) -> None:
        self.count += 1
        self.nbytes += nbytes

    def take_back(self, nbytes: int) -> None:
        """Takes out one that was added."""
        self.count -= 1
        self.nbytes -= nbytes


@dataclass(slots=True)
class Counters:
    """kept: blocks that should have left and had no room on the host. reloads_on_demand: blocks that backward asked
    for before the policy had begun to bring them back. host_waits: times the host waited for room to come free.
    postponed: early reloads that the device had no room for. blocking: copies for which the host had to wait,
    because their host memory is not pinned. spilled, fetched: blocks written to disk and read from there.
    disk_waits: times the host waited for a read. overflowed: blocks that were read into memory beyond the host
    tier's limit, because backward needed them and there was no other way. step_waits: forwards that the host began
    only when the device was through with the copies of a forward long before. stayed: saved tensors that did not
    leave the device, by reason."""

    offloaded: Moved = field(default_factory=Moved)
    released: Moved = field(default_factory=Moved)
    reloaded: Moved = field(default_factory=Moved)
    kept: Moved = field(default_factory=Moved)
    blocking: Moved = field(default_factory=Moved)
    spilled: Moved = field(default_factory=Moved)
    fetched: Moved = field(default_factory=Moved)
    disk_waits: int = 0
    overflowed: int = 0
    reloads_on_demand: int = 0
    host_waits: int = 0
    step_waits: int = 0
    postponed: int = 0
    stayed: dict[Reason, Moved] = field(default_factory=lambda: {reason: Moved() for reason in REASONS})

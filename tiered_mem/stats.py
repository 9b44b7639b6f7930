"""What a manager counts, and how it tells."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from .allocators import PoolStats
from .block import Block, Place
from .sizes import format_bytes

# Counts and bytes; a name for what is one, and a float for a share.
Stats = dict[str, int | float | str]


@dataclass(slots=True)
class Moved:
    """Blocks and their bytes, since the manager was made."""

    count: int = 0
    nbytes: int = 0

    def add(self, nbytes: int) -> None:
        self.count += 1
        self.nbytes += nbytes


@dataclass(slots=True)
class Counters:
    """kept: blocks that should have left and had no room on the host. reloads_on_demand: blocks that backward asked
    for before the policy had begun to bring them back. host_waits: times the host waited for room to come free.
    postponed: early reloads that the device had no room for. blocking: copies for which the host had to wait,
    because their host memory is not pinned."""

    offloaded: Moved = field(default_factory=Moved)
    released: Moved = field(default_factory=Moved)
    reloaded: Moved = field(default_factory=Moved)
    kept: Moved = field(default_factory=Moved)
    blocking: Moved = field(default_factory=Moved)
    reloads_on_demand: int = 0
    host_waits: int = 0
    postponed: int = 0


def flatten(counters: Counters, pool: PoolStats, slots: int, blocks: Collection[Block]) -> Stats:
    """One flat dictionary, in the manner of torch.cuda.memory_stats()."""
    stats: Stats = {
        "host.source": pool.source,
        "host.capacity": pool.capacity or 0,
        "host.reserved.current": pool.reserved,
        "host.used.current": pool.used,
        "host.used.peak": pool.peak,
        "host.largest_free": pool.largest_free,
        "host.fragmentation": pool.fragmentation,
        "host.slabs": pool.slabs,
        "host.failures.total": pool.failures,
        "host.source_calls.total": pool.source_calls,
        "host.source_failures.total": pool.source_failures,
        "host.slots": slots,
        "host.waits.total": counters.host_waits,
        "reloads_on_demand.total": counters.reloads_on_demand,
        "reloads_postponed.total": counters.postponed,
    }
    for name in ("offloaded", "released", "reloaded", "kept"):
        moved: Moved = getattr(counters, name)
        stats[f"{name}.blocks.total"] = moved.count
        stats[f"{name}.bytes.total"] = moved.nbytes
    stats["blocking.copies.total"] = counters.blocking.count
    stats["blocking.bytes.total"] = counters.blocking.nbytes
    for place in (Place.DEVICE, Place.LEAVING, Place.HOST, Place.ARRIVING):
        sizes = [block.nbytes for block in blocks if block.place is place]
        stats[f"{place.value}.blocks.current"] = len(sizes)
        stats[f"{place.value}.bytes.current"] = sum(sizes)
    return stats


def summary(device: str, stats: Mapping[str, int | float | str], overlap: Sequence[tuple[str, str]]) -> str:
    """The stats as a table for people, with rows on overlap."""

    def size(name: str) -> str:
        return format_bytes(int(stats[name]))

    rows = [
        ("device", device),
        ("host memory from", f"{stats['host.source']}, {stats['host.slabs']} slabs"),
        ("host used / peak", f"{size('host.used.current')} / {size('host.used.peak')}"),
        ("host reserved / limit", f"{size('host.reserved.current')} / {size('host.capacity')}"),
    ]
    for name in ("offloaded", "released", "reloaded", "kept"):
        label = "kept, host tier full" if name == "kept" else name
        rows.append((label, f"{stats[f'{name}.blocks.total']} blocks, {size(f'{name}.bytes.total')}"))
    rows.append(("reloads on demand", str(stats["reloads_on_demand.total"])))
    rows.append(("host waits for room", str(stats["host.waits.total"])))
    blocking = f"{stats['blocking.copies.total']}, {size('blocking.bytes.total')}"
    rows.append(("copies that blocked the host", blocking))
    rows += overlap
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)

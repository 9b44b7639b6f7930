"""A manager's counts, as a dictionary and as a table, and its policy's report."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from .activations.block import Block
from .activations.movable import WORDS
from .allocators.base import PoolStats
from .ground.stats import REASONS, Counters, Moved, Stats
from .policies.base import Policy
from .policies.places import Place
from .policies.planned import PlannedPolicy
from .policies.planning.report import Report
from .sizes import format_bytes
from .spill.lower_tier import TierStats


class ScalarWriter(Protocol):
    """Keeps numbers by name and step, as TensorBoard's SummaryWriter does."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None, /) -> object:
        """Keeps one number."""


def flatten(
    counters: Counters, pool: PoolStats, slots: int, blocks: Collection[Block], disk: TierStats | None
) -> Stats:
    """One flat dictionary, in the manner of torch.cuda.memory_stats(). Without a disk tier it has no "disk..."."""
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
        "host.step_waits.total": counters.step_waits,
        "reloads_on_demand.total": counters.reloads_on_demand,
        "reloads_postponed.total": counters.postponed,
    }
    names = ("offloaded", "released", "reloaded", "kept")
    for name in names if disk is None else (*names, "spilled", "fetched"):
        moved: Moved = getattr(counters, name)
        stats[f"{name}.blocks.total"] = moved.count
        stats[f"{name}.bytes.total"] = moved.nbytes
    for reason, stayed in counters.stayed.items():
        stats[f"stayed.{reason}.tensors.total"] = stayed.count
        stats[f"stayed.{reason}.bytes.total"] = stayed.nbytes
    stats["blocking.copies.total"] = counters.blocking.count
    stats["blocking.bytes.total"] = counters.blocking.nbytes
    places = [Place.DEVICE, Place.LEAVING, Place.HOST, Place.ARRIVING]
    if disk is not None:
        places.append(Place.DISK)
        stats |= {
            "disk.capacity": disk.capacity,
            "disk.used.current": disk.used,
            "disk.used.peak": disk.peak,
            "disk.reserved.current": disk.reserved,
            "disk.records": disk.records,
            "disk.files": disk.files,
            "disk.written.total": disk.written,
            "disk.read.total": disk.read,
            "disk.failures.total": disk.failures,
            "disk.state": disk.state,
            "disk.direct": int(disk.direct),
            "disk.waits.total": counters.disk_waits,
            "disk.overflows.total": counters.overflowed,
        }
    for place in places:
        sizes = [block.nbytes for block in blocks if block.place is place]
        stats[f"{place.value}.blocks.current"] = len(sizes)
        stats[f"{place.value}.bytes.current"] = sum(sizes)
    return stats


def summary(rows: Sequence[tuple[str, str]]) -> str:
    """The rows as a table for people."""
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)


def stats_rows(
    device: str, stats: Mapping[str, int | float | str], overlap: Sequence[tuple[str, str]]
) -> list[tuple[str, str]]:
    """The stats as labels and values, with rows on overlap."""

    def size(name: str) -> str:
        return format_bytes(int(stats[name]))

    rows = [
        ("device", device),
        ("host memory from", f"{stats['host.source']}, {stats['host.slabs']} slabs"),
        ("host used / peak", f"{size('host.used.current')} / {size('host.used.peak')}"),
        ("host reserved / limit", f"{size('host.reserved.current')} / {size('host.capacity')}"),
    ]
    if "node.bytes" in stats:
        of = f"{stats['node.ranks']} ranks, this one {size('node.own')}, at least {size('node.floor')}"
        rows.append(("host of all ranks / limit", f"{size('node.used')} / {size('node.bytes')}: {of}"))
    for name in ("offloaded", "released", "reloaded", "kept"):
        label = "kept, host tier full" if name == "kept" else name
        rows.append((label, f"{stats[f'{name}.blocks.total']} blocks, {size(f'{name}.bytes.total')}"))
    stayed = [f"{size(name)} {reason}" for reason in REASONS if stats[name := f"stayed.{reason}.bytes.total"]]
    rows.append(("saved and stayed", ", ".join(stayed) or "nothing"))
    if stats["parked.host_bytes.current"]:
        offloaded = f"{stats['parked.storages.current']} storages, {size('parked.bytes.current')}"
        rows.append(("modules, offloaded now", offloaded))
        rows.append(("host memory for modules", size("parked.host_bytes.current")))
    if "disk.state" in stats:
        direct = "direct" if stats["disk.direct"] else "buffered"
        rows.append(("disk used / peak", f"{size('disk.used.current')} / {size('disk.used.peak')}"))
        rows.append(("disk reserved / limit", f"{size('disk.reserved.current')} / {size('disk.capacity')}"))
        if "node.spill.bytes" in stats:
            rows.append(("disk of all ranks / limit", f"{size('node.spill.used')} / {size('node.spill.bytes')}"))
        if "node.writes.bytes" in stats:
            rows.append(("written by all / limit", f"{size('node.writes.used')} / {size('node.writes.bytes')}"))
        rows.append(("disk tier", f"{stats['disk.state']}, {direct}, {stats['disk.failures.total']} failures"))
        for name in ("spilled", "fetched"):
            rows.append((name, f"{stats[f'{name}.blocks.total']} blocks, {size(f'{name}.bytes.total')}"))
        rows.append(("written / read", f"{size('disk.written.total')} / {size('disk.read.total')}"))
        rows.append(("host waits for the disk", str(stats["disk.waits.total"])))
    rows.append(("reloads on demand", str(stats["reloads_on_demand.total"])))
    rows.append(("host waits for room", str(stats["host.waits.total"])))
    rows.append(("host waits for old steps", str(stats["host.step_waits.total"])))
    blocking = f"{stats['blocking.copies.total']}, {size('blocking.bytes.total')}"
    rows.append(("copies that blocked the host", blocking))
    return [*rows, *overlap]


def plan_report(policy: Policy, counters: Counters) -> Report:
    """What a policy that plans has to report, or why there is no plan; and what has moved until now."""
    missing = f"{policy.name} makes no plans, as policy='auto' does; with trace=True all waits are told"
    told = policy.report() if isinstance(policy, PlannedPolicy) else Report(missing)
    stayed = {WORDS[reason]: moved.nbytes for reason, moved in counters.stayed.items() if moved.nbytes}
    return replace(told, moved_until_now=counters.offloaded.nbytes, stayed_until_now=stayed)

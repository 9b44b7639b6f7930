"""How much host memory pools take for what training asks of them: allocation traces, replayed without memory.

Four pools are compared: SlabPool as it grows by itself; SlabPool with all of its capacity taken in advance, which
is the least that serves the trace, found in steps of a thousandth of the peak; powers of two, which is how torch's
own pinned allocator is made: a freed block is kept for the next request that rounds up to its size, and is never
split or given back; and the same with the sizes as they are, up to whole pages.

`ratio` is the most that a pool took from its source over the most that was asked of it at a time, which is `GiB`.
`steady` leaves out the first three steps: it is what the pool holds in the end over the most that was live after
them. Calls are those to the source, where memory is pinned, `later` those after the three steps. Live bytes are the
requested ones, without any rounding. µs are for each operation.

The traces are worked out from the shapes of models (allocation_traces.py), or were recorded (traces/) while the
example's GPT was trained. To record them again, which takes a few minutes:

    python -m ascend_emulator -m benchmarks.allocator_replay --record benchmarks/traces
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.table import Table

from benchmarks.allocation_traces import generated_traces
from benchmarks.recorded import Allocated, Deallocated, Marked, Operation, read_trace
from tiered_mem.allocators import HostMemory, Region, SlabPool
from tiered_mem.allocators.base import OutOfHostMemory, round_up
from tiered_mem.sizes import format_bytes, parse_bytes

RECORDED = Path(__file__).parent / "traces"
GIB = 1 << 30
WARM_UP = 3  # steps

Trace = Sequence[Operation]


def main() -> None:
    options = parse()
    console = Console()
    if options.record is not None:
        from benchmarks.record_allocations import record  # it needs a device, and nothing else here does

        for path in record(options.record):
            console.print(f"{path}: {path.stat().st_size:,} bytes", highlight=False)
        return
    makers = pools(options.slab_bytes)
    rows = []
    for name, load in traces().items():
        if options.only in name:
            trace = load()
            everyone = {**makers, "SlabPool, in advance": in_advance(trace)} if "SlabPool" in makers else makers
            for pool, make in everyone.items():
                rows.append(Row(name, pool, *measure(trace, make, options.repeats)))
    console.print(table(rows))
    if options.json is not None:
        options.json.write_text(json.dumps([flat(row) for row in rows], indent=1) + "\n")


class Pool(Protocol):
    """What a replay asks for."""

    def allocate(self, nbytes: int) -> Region: ...

    def deallocate(self, region: Region) -> None: ...


MakePool = Callable[[HostMemory], Pool]


@dataclass(frozen=True)
class Figures:
    """What a trace made a pool take.

    peak_live: bytes. reserved_per_live, steady_reserved_per_live: ratios, the second one without the first three
        steps. source_calls, steady_source_calls: requests and returns, the second ones after those steps.
    """

    operations: int
    peak_live: int
    reserved_per_live: float
    steady_reserved_per_live: float
    source_calls: int
    steady_source_calls: int


@dataclass(frozen=True)
class Row:
    trace: str
    pool: str
    figures: Figures
    us_per_operation: float


class CountingSource:
    """Bare addresses with nothing behind them, and how much of them is taken."""

    def __init__(self) -> None:
        self.reserved = 0
        self.peak = 0
        self.calls = 0
        self._next = 1 << 40

    def allocate(self, nbytes: int) -> Region:
        region = Region(self._next, nbytes)
        self._next += round_up(nbytes)
        self.calls += 1
        self.reserved += nbytes
        self.peak = max(self.peak, self.reserved)
        return region

    def deallocate(self, region: Region) -> None:
        self.calls += 1
        self.reserved -= region.nbytes

    def footprint(self, nbytes: int) -> int:
        return nbytes

    def close(self) -> None:
        """There is nothing to release."""


class CachingPool:
    """Rounds each request up to a class of sizes, and keeps what is freed for the next request of that class."""

    def __init__(self, source: HostMemory, round_to_class: Callable[[int], int]) -> None:
        self._source = source
        self._round = round_to_class
        self._free: dict[int, list[Region]] = {}

    def allocate(self, nbytes: int) -> Region:
        size = self._round(nbytes)
        free = self._free.get(size)
        return free.pop() if free else self._source.allocate(size)

    def deallocate(self, region: Region) -> None:
        self._free.setdefault(region.nbytes, []).append(region)


def power_of_two(nbytes: int) -> int:
    """The smallest power of two that is not below a size."""
    return 1 << (nbytes - 1).bit_length()


def pools(slab_bytes: Sequence[int] = ()) -> dict[str, MakePool]:
    """The pools by name; SlabPool as it is by itself, or with each of the slab sizes."""
    slabs: dict[str, MakePool] = {f"slabs of {format_bytes(size)}": slab_pool(size) for size in slab_bytes}
    return {
        **(slabs or {"SlabPool": SlabPool}),
        "powers of two": lambda source: CachingPool(source, power_of_two),
        "exact sizes": lambda source: CachingPool(source, round_up),
    }


def in_advance(trace: Trace) -> MakePool:
    """SlabPool with the least capacity that serves the trace, all of it taken before the first request."""
    peak = count(trace, SlabPool).peak_live
    for thousandths in range(1000, 2000):
        make = partial(preallocated, round_up(peak * thousandths // 1000))
        try:
            count(trace, make)
        except OutOfHostMemory:
            continue
        return make
    raise ValueError(f"not even twice the peak of {peak} bytes serves the trace")


def preallocated(capacity: int, source: HostMemory) -> SlabPool:
    pool = SlabPool(source, capacity=capacity)
    pool.preallocate(capacity)
    return pool


def slab_pool(slab_bytes: int) -> MakePool:
    return lambda source: SlabPool(source, slab_bytes)


def traces() -> dict[str, Callable[[], Trace]]:
    """What makes or reads each trace, by name."""
    recorded = {
        f"recorded {path.name.removesuffix('.trace.gz')}": partial(load, path)
        for path in sorted(RECORDED.glob("*.trace.gz"))
    }
    return {**{name: made(make) for name, make in generated_traces().items()}, **recorded}


def made(make: Callable[[], Iterator[Operation]]) -> Callable[[], Trace]:
    return lambda: list(make())


def load(path: Path) -> Trace:
    """The operations of a trace that was packed with gzip."""
    with gzip.open(path, "rt") as file:
        return list(read_trace(file))


def measure(trace: Trace, make: MakePool, repeats: int) -> tuple[Figures, float]:
    """The figures of a replay, and the median of its microseconds for each operation."""
    figures = count(trace, make)
    seconds = statistics.median(seconds_of(trace, make(CountingSource())) for _ in range(repeats))
    return figures, seconds / figures.operations * 1e6


def count(trace: Trace, make: MakePool) -> Figures:
    """Replays a trace and counts. Each mark that begins with "step" begins a step."""
    source = CountingSource()
    pool = make(source)
    regions: dict[int, tuple[Region, int]] = {}
    operations = steps = live = peak = steady_peak = calls_before = 0
    for operation in trace:
        match operation:
            case Allocated(number, nbytes):
                regions[number] = pool.allocate(nbytes), nbytes
                live += nbytes
                peak = max(peak, live)
                steady_peak = max(steady_peak, live)
                operations += 1
            case Deallocated(number):
                region, nbytes = regions.pop(number)
                pool.deallocate(region)
                live -= nbytes
                operations += 1
            case Marked(name) if name.startswith("step"):
                if steps == WARM_UP:
                    calls_before = source.calls
                    steady_peak = live
                steps += 1
    if steps <= WARM_UP:
        raise ValueError(f"a trace of {steps} steps says nothing of what follows the first {WARM_UP}")
    if not steady_peak:
        raise ValueError(f"nothing was live after the first {WARM_UP} steps")
    return Figures(
        operations,
        peak,
        source.peak / peak,
        source.reserved / steady_peak,
        source.calls,
        source.calls - calls_before,
    )


def seconds_of(trace: Trace, pool: Pool) -> float:
    """How long a replay takes, and nothing else done meanwhile."""
    regions: dict[int, Region] = {}
    began = time.perf_counter()
    for operation in trace:
        if isinstance(operation, Allocated):
            regions[operation.number] = pool.allocate(operation.nbytes)
        elif isinstance(operation, Deallocated):
            pool.deallocate(regions.pop(operation.number))
    return time.perf_counter() - began


def table(rows: Sequence[Row]) -> Table:
    result = Table(title="reserved / live bytes, calls to the source", caption="steady, later: after three steps")
    for column in ("trace, pool", "GiB", "ratio", "steady", "calls", "later", "µs"):
        result.add_column(column, justify="left" if column == "trace, pool" else "right", no_wrap=True)
    for trace, group in itertools.groupby(rows, lambda row: row.trace):
        of_pools = list(group)
        result.add_section()
        result.add_row(trace, f"{of_pools[0].figures.peak_live / GIB:.2f}", style="bold")
        for row in of_pools:
            figures = row.figures
            ratios = (f"{figures.reserved_per_live:.3f}", f"{figures.steady_reserved_per_live:.3f}")
            calls = (str(figures.source_calls), str(figures.steady_source_calls))
            result.add_row(f"  {row.pool}", "", *ratios, *calls, f"{row.us_per_operation:.1f}")
    return result


def flat(row: Row) -> dict[str, object]:
    figures = asdict(row.figures)
    return {"trace": row.trace, "pool": row.pool, **figures, "us_per_operation": row.us_per_operation}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only the traces that have this in their name")
    parser.add_argument(
        "--slab-bytes",
        type=parse_bytes,
        nargs="+",
        default=(),
        metavar="SIZE",
        help="slab sizes to try, such as 256MiB; by default SlabPool is as it is by itself",
    )
    parser.add_argument("--repeats", type=int, default=5, help="how often a replay is timed")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="record the traces again, and replay nothing")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()

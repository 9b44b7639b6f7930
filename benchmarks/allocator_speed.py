"""What a pair of calls to the slab pool costs, with few and with many regions live, in microseconds.

`churn` takes back a region picked at random and takes a new one, so that free ranges lie everywhere; `again` takes
a region and gives it back at once. Sizes are drawn evenly from 1 byte to 8 MiB. No memory is behind the addresses.

    TORCH_DEVICE_BACKEND_AUTOLOAD=0 python -m benchmarks.allocator_speed
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from rich.console import Console

from benchmarks.allocator_replay import CountingSource
from benchmarks.report import report
from tiered_mem.allocators import SlabPool

LARGEST = 8 << 20
PAIRS = 5000


def main() -> None:
    options = parse()
    result: dict[str, float] = {}
    for live in (1000, 100_000):
        churn, again = us_per_pair(live, options.seed)
        result |= {f"churn, {live} live (us)": churn, f"again, {live} live (us)": again}
    report(result, Console(), options.json)


def us_per_pair(live: int, seed: int) -> tuple[float, float]:
    """The medians of both kinds of pairs, in a pool with so many live regions."""
    random = Random(seed)
    pool = SlabPool(CountingSource())
    regions = [pool.allocate(random.randint(1, LARGEST)) for _ in range(live)]

    def churn() -> float:
        index, size = random.randrange(live), random.randint(1, LARGEST)
        old = regions[index]
        began = time.perf_counter()
        pool.deallocate(old)
        regions[index] = pool.allocate(size)
        return time.perf_counter() - began

    def again() -> float:
        size = random.randint(1, LARGEST)
        began = time.perf_counter()
        pool.deallocate(pool.allocate(size))
        return time.perf_counter() - began

    for _ in range(live):
        churn()
    return median_of(churn), median_of(again)


def median_of(pair: Callable[[], float]) -> float:
    """In microseconds."""
    return statistics.median(pair() for _ in range(PAIRS)) * 1e6


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()

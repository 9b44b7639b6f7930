"""SlabPool shared by threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random

from tests.allocators.numbered_memory import NumberedMemory
from tests.contracts import ends_hold, write_ends
from tiered_mem.allocators import PageableMemory, Region, SlabPool
from tiered_mem.allocators.base import OutOfHostMemory

MIB = 1 << 20


def sum_over_threads(work: Callable[[int], int], count: int) -> int:
    """The sum of work(0) to work(count - 1), each on a thread of its own. They are interrupted all the time."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(count) as threads:
            return sum(threads.map(work, range(count)))
    finally:
        sys.setswitchinterval(interval)


def test_threads_that_run_dry_together_grow_the_pool_once() -> None:
    class Slow(NumberedMemory):
        """Holds up its first caller until a second one comes, or for a moment if none does."""

        def __init__(self) -> None:
            super().__init__()
            self.callers = 0
            self.second = threading.Event()

        def allocate(self, nbytes: int) -> Region:
            self.callers += 1
            if self.callers == 1:
                self.second.wait(timeout=0.2)
            self.second.set()
            return super().allocate(nbytes)

    pool = SlabPool(Slow(), slab_bytes=8 * MIB, capacity=8 * MIB)
    start = threading.Barrier(8)

    def work() -> Region:
        start.wait(timeout=60)
        return pool.allocate(MIB)

    with ThreadPoolExecutor(8) as threads:
        regions = [future.result() for future in [threads.submit(work) for _ in range(8)]]
    assert len({region.ptr for region in regions}) == 8
    assert pool.stats().source_calls == 1


def test_many_threads_never_share_memory() -> None:
    source = PageableMemory()
    pool = SlabPool(source, slab_bytes=256 << 10, capacity=1 << 20)

    def work(seed: int) -> int:
        random = Random(seed)
        held: list[tuple[Region, int]] = []
        refused = 0
        for step in range(4000):
            if held and (len(held) > 8 or random.random() < 0.45):
                region, value = held.pop(random.randrange(len(held)))
                assert ends_hold(region, value)
                pool.deallocate(region)
                continue
            try:
                region = pool.allocate(random.randrange(1, 100 << 10))
            except OutOfHostMemory:
                refused += 1
                continue
            value = (seed * 4000 + step) % 255 + 1
            write_ends(region, value)
            held.append((region, value))
            if step % 100 == 0:
                pool.trim()
        for region, value in held:
            assert ends_hold(region, value)
            pool.deallocate(region)
        return refused

    refused = sum_over_threads(work, 4)
    stats = pool.stats()
    assert stats.used == 0
    assert stats.failures == refused
    assert 0 < stats.peak <= 1 << 20
    pool.close()
    source.close()

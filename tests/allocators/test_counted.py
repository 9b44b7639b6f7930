"""CountedMemory: the shared contract, and what is particular to it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError

import pytest

from tests.allocators.numbered_memory import NumberedMemory
from tests.contracts import check_host_memory
from tiered_mem.allocators import Count, CountedMemory, OutOfHostMemory, PageableMemory, Region, SlabPool

MIB = 1 << 20


def test_contract() -> None:
    source = PageableMemory()
    check_host_memory(lambda: CountedMemory(source))
    source.close()


def test_now_at_most_and_in_all() -> None:
    memory = CountedMemory(NumberedMemory())
    first, second = memory.allocate(3 * MIB), memory.allocate(2 * MIB)
    memory.deallocate(first)
    memory.allocate(MIB)
    memory.deallocate(second)
    counts = memory.counts()
    assert counts.nbytes == Count(current=MIB, peak=5 * MIB, total=6 * MIB)
    assert counts.regions == Count(current=1, peak=2, total=3)
    assert counts.failures == 0


def test_bytes_are_counted_as_the_source_takes_them() -> None:
    memory = CountedMemory(PageableMemory())
    region = memory.allocate(1)
    assert memory.counts().nbytes == Count(4096, 4096, 4096)
    memory.deallocate(region)
    assert memory.counts().nbytes == Count(0, 4096, 4096)
    memory.close()


def test_failures_are_counted_and_passed_on() -> None:
    source = NumberedMemory()
    memory = CountedMemory(source)
    for refusal in (OutOfHostMemory("dry", "Wait", needed=1, used=0), OSError("broken")):
        source.refuse = refusal
        with pytest.raises((OutOfHostMemory, OSError)) as caught:
            memory.allocate(1)
        assert caught.value is refusal
    assert memory.counts().failures == 2
    assert memory.counts().regions == Count()
    with pytest.raises(ValueError, match="must be positive"):
        memory.allocate(0)
    assert memory.counts().failures == 2, "the source was not asked"


def test_a_region_that_the_source_does_not_take_back_still_counts() -> None:
    source = NumberedMemory()
    memory = CountedMemory(source)
    region = memory.allocate(MIB)
    source.refuse_back = OSError("not now")
    with pytest.raises(OSError, match="not now"):
        memory.deallocate(region)
    assert memory.counts().nbytes.current == MIB
    source.refuse_back = None
    memory.deallocate(region)
    assert memory.counts().nbytes.current == 0


def test_seconds_are_those_spent_in_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    class Slow(NumberedMemory):
        def allocate(self, nbytes: int) -> Region:
            nonlocal now
            now += 2.0
            return super().allocate(nbytes)

        def deallocate(self, region: Region) -> None:
            nonlocal now
            now += 0.5
            super().deallocate(region)

    monkeypatch.setattr("time.perf_counter", lambda: now)
    source = Slow()
    memory = CountedMemory(source)
    region = memory.allocate(MIB)
    now += 100.0
    assert memory.counts().seconds == 2.0
    memory.deallocate(region)
    source.refuse = OSError("broken")
    with pytest.raises(OSError, match="broken"):
        memory.allocate(1)
    assert memory.counts().seconds == 4.5


def test_it_tells_what_a_pool_asks_for() -> None:
    memory = CountedMemory(NumberedMemory())
    pool = SlabPool(memory, slab_bytes=MIB, capacity=4 * MIB)
    for region in [pool.allocate(MIB // 4) for _ in range(5)]:
        pool.deallocate(region)
    assert memory.counts().regions == Count(2, 2, 2)
    pool.close()
    assert memory.counts().regions == Count(0, 2, 2)


def test_counts_are_of_their_moment_and_cannot_be_changed() -> None:
    memory = CountedMemory(NumberedMemory())
    before = memory.counts()
    memory.allocate(1)
    assert before.regions.total == 0
    with pytest.raises(FrozenInstanceError):
        before.failures = 1  # type: ignore[misc]


def test_threads_lose_no_count() -> None:
    memory = CountedMemory(PageableMemory())

    def work(_: int) -> None:
        for _ in range(200):
            memory.deallocate(memory.allocate(4096))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    counts = memory.counts()
    assert (counts.regions.current, counts.regions.total) == (0, 800)
    assert (counts.nbytes.current, counts.nbytes.total) == (0, 800 * 4096)
    assert 1 <= counts.regions.peak <= 4

"""SlabPool: one case for each thing it promises of regions, of errors and of closing."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from types import FrameType

import pytest

from tests.allocators.numbered_memory import NumberedMemory
from tests.contracts import check_host_memory
from tiered_mem.allocators import PageableMemory, Region, SlabPool
from tiered_mem.allocators.base import OutOfHostMemory

MIB = 1 << 20
GIB = 1 << 30


def test_contract() -> None:
    source = PageableMemory()
    check_host_memory(lambda: SlabPool(source, slab_bytes=4 * MIB))
    check_host_memory(lambda: SlabPool(source, slab_bytes=4 * MIB, capacity=16 * MIB))
    source.close()


def test_pool_over_pool() -> None:
    source = PageableMemory()
    lower = SlabPool(source, slab_bytes=16 * MIB)
    check_host_memory(lambda: SlabPool(lower, slab_bytes=4 * MIB))
    lower.close()
    source.close()


def test_best_fit_takes_the_smallest_gap_that_holds_the_request() -> None:
    pool = SlabPool(NumberedMemory(), slab_bytes=GIB)
    wide, _, narrow, _, exact, _ = (pool.allocate(n * MIB) for n in (64, 1, 8, 1, 16, 1))
    for region in (wide, narrow, exact):
        pool.deallocate(region)
    assert pool.allocate(16 * MIB) == exact
    assert pool.allocate(7 * MIB).ptr == narrow.ptr
    assert pool.allocate(2 * MIB).ptr == wide.ptr
    assert pool.allocate(1 * MIB).ptr == narrow.ptr + 7 * MIB


def test_of_equal_gaps_the_newest_is_taken() -> None:
    pool = SlabPool(NumberedMemory(), slab_bytes=MIB)
    regions = [pool.allocate(MIB) for _ in range(3)]
    for region in (regions[1], regions[2], regions[0]):
        pool.deallocate(region)
    assert [pool.allocate(MIB) for _ in range(3)] == [regions[0], regions[2], regions[1]]


@pytest.mark.parametrize("order", ["012", "021", "102", "120", "201", "210"])
def test_freed_neighbours_merge_on_both_sides(order: str) -> None:
    pool = SlabPool(NumberedMemory(), slab_bytes=3 * MIB)
    regions = [pool.allocate(MIB) for _ in range(3)]
    for index in order:
        pool.deallocate(regions[int(index)])
    assert pool.stats().largest_free == 3 * MIB
    assert pool.allocate(3 * MIB).ptr == regions[0].ptr
    assert pool.stats().source_calls == 1


def test_a_live_region_keeps_its_neighbours_apart() -> None:
    pool = SlabPool(NumberedMemory(), slab_bytes=3 * MIB)
    left, _, right = (pool.allocate(MIB) for _ in range(3))
    pool.deallocate(left)
    pool.deallocate(right)
    assert pool.stats().largest_free == MIB
    assert pool.stats().fragmentation == 0.5


def test_neighbouring_slabs_never_merge() -> None:
    source = NumberedMemory()
    pool = SlabPool(source, slab_bytes=MIB)
    first, second = pool.allocate(MIB), pool.allocate(MIB)
    assert first.ptr + first.nbytes == second.ptr
    pool.deallocate(first)
    pool.deallocate(second)
    assert pool.stats().largest_free == MIB
    assert {pool.slab(pool.allocate(MIB)) for _ in range(2)} == source.live


def test_sizes_are_counted_in_whole_units_of_4096() -> None:
    pool = SlabPool(NumberedMemory(), slab_bytes=MIB)
    one, two = pool.allocate(1), pool.allocate(4097)
    assert (one.nbytes, two.nbytes, two.ptr - one.ptr) == (1, 4097, 4096)
    assert pool.stats().used == 3 * 4096
    pool.deallocate(two)
    assert (pool.stats().used, pool.stats().peak) == (4096, 3 * 4096)


def test_neither_call_takes_more_steps_for_there_being_many_slabs() -> None:
    def steps(call: Callable[[], object]) -> int:
        """How many of the pool's instructions a call takes, and not what the garbage collector runs meanwhile."""
        count = 0

        def trace(frame: FrameType, event: str, argument: object) -> object:
            nonlocal count
            if "allocators" not in frame.f_globals["__name__"]:
                return None
            frame.f_trace_opcodes = True
            count += 1
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            call()
        finally:
            sys.settrace(before)
        return count

    def steps_in_a_pool_of(slabs: int) -> int:
        pool = SlabPool(NumberedMemory(), slab_bytes=MIB)
        regions = [pool.allocate(MIB) for _ in range(slabs)]
        pool.deallocate(regions.pop())
        taken = steps(lambda: pool.deallocate(pool.allocate(MIB)))
        assert pool.stats().source_calls == slabs
        return taken

    steps_in_a_pool_of(1)  # Python 3.12 counts instructions from the second time on
    assert steps_in_a_pool_of(300) == steps_in_a_pool_of(3) > 0


def test_a_region_may_be_given_back_in_the_middle_of_another_call() -> None:
    """As by a `__del__` that the garbage collector runs there."""

    class Collecting(NumberedMemory):
        def allocate(self, nbytes: int) -> Region:
            while garbage:
                region = garbage.pop()
                pool.deallocate(region)
                with pytest.raises(ValueError, match="freed already"):
                    pool.deallocate(region)
            return super().allocate(nbytes)

    garbage: list[Region] = []
    source = Collecting()
    pool = SlabPool(source, slab_bytes=MIB)
    garbage += [pool.allocate(MIB), pool.allocate(MIB)]
    kept = pool.allocate(MIB)
    assert pool.stats().used == MIB
    assert pool.trim() == 2 * MIB
    pool.deallocate(kept)
    pool.close()


def test_what_can_never_fit_and_what_does_not_fit_now() -> None:
    pool = SlabPool(NumberedMemory(), slab_bytes=GIB, capacity=2 * GIB)
    with pytest.raises(OutOfHostMemory, match="can never fit") as never:
        pool.allocate(3 * GIB)
    numbers = "needed 3.0 GiB, free 2.0 GiB, largest free 2.0 GiB, used 0 B, limit 2.0 GiB"
    assert numbers in str(never.value)
    assert pool.stats().source_calls == 0

    kept, freed = pool.allocate(GIB), pool.allocate(GIB // 2)
    with pytest.raises(OutOfHostMemory, match="does not fit into the pool now") as now:
        pool.allocate(GIB - 4096)
    error = now.value
    assert (error.needed, error.used, error.free) == (GIB - 4096, 3 * GIB // 2, GIB // 2)
    assert (error.largest_free, error.limit) == (GIB // 2, 2 * GIB)
    assert "Free regions and try again, or raise the capacity" in str(error)
    assert pool.stats().failures == 2
    pool.deallocate(freed)
    assert pool.allocate(GIB - 4096).ptr == kept.ptr + GIB


def test_out_of_memory_survives_pickling() -> None:
    pool = SlabPool(NumberedMemory(), capacity=MIB)
    with pytest.raises(MemoryError) as caught:
        pool.allocate(2 * MIB)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is OutOfHostMemory
    assert (str(copy), copy.needed, copy.limit) == (str(caught.value), 2 * MIB, MIB)


def test_slab_of_a_region_that_is_not_allocated() -> None:
    pool = SlabPool(NumberedMemory(), slab_bytes=MIB)
    region = pool.allocate(8192)
    with pytest.raises(ValueError, match="4096 bytes at"):
        pool.slab(Region(region.ptr, 4096))
    pool.deallocate(region)
    with pytest.raises(ValueError, match="freed already"):
        pool.slab(region)


def test_close_names_the_leak_and_frees_nothing() -> None:
    source = NumberedMemory()
    pool = SlabPool(source, slab_bytes=MIB)
    regions = [pool.allocate(4096) for _ in range(6)]
    with pytest.raises(RuntimeError, match=rf"6 regions of 24.0 KiB.*{regions[0].ptr:#x}.*, \.\.\."):
        pool.close()
    assert len(source.live) == 1
    for region in regions:
        pool.deallocate(region)
    pool.close()
    pool.close()
    assert not source.live
    with pytest.raises(RuntimeError, match="SlabPool is closed"):
        pool.allocate(1)


def test_as_a_context() -> None:
    source = NumberedMemory()
    with SlabPool(source) as pool:
        pool.deallocate(pool.allocate(1))
    assert not source.live
    with pytest.raises(RuntimeError, match="still allocated"), SlabPool(source) as pool:
        pool.allocate(1)


def test_a_leak_does_not_hide_the_error_that_caused_it(caplog: pytest.LogCaptureFixture) -> None:
    source = NumberedMemory()
    pool = SlabPool(source)
    pool.allocate(1)
    with pytest.raises(ValueError, match="must be positive"), pool:
        pool.allocate(0)
    assert len(source.live) == 1
    assert "SlabPool was left open: cannot close SlabPool: 1 region of" in caplog.text


@pytest.mark.parametrize(("slab_bytes", "capacity"), [(0, None), (-1, None), (MIB, 0), (MIB, 4095)])
def test_bad_settings(slab_bytes: int, capacity: int | None) -> None:
    with pytest.raises(ValueError, match=r"must be .* got"):
        SlabPool(NumberedMemory(), slab_bytes, capacity)

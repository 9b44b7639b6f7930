"""SlabPool: one case for each thing it promises."""

from __future__ import annotations

import logging
import pickle

import pytest

from tests.allocators.numbered_memory import NumberedMemory
from tests.contracts import check_host_memory
from tiered_mem.allocators import LimitedMemory, OutOfHostMemory, PageableMemory, Region, SlabPool

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


def test_growth_is_by_whole_slabs_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tiered_mem.allocators")
    pool = SlabPool(NumberedMemory(), slab_bytes=2 * MIB)
    assert (pool.stats().slabs, pool.stats().reserved) == (0, 0)
    pool.allocate(MIB)
    pool.allocate(MIB)
    assert (pool.stats().slabs, pool.stats().reserved) == (1, 2 * MIB)
    pool.allocate(1)
    stats = pool.stats()
    assert (stats.slabs, stats.reserved, stats.source_calls, stats.failures) == (2, 4 * MIB, 2, 0)
    assert stats.fragmentation == 0
    assert (stats.source, stats.capacity) == ("NumberedMemory", None)
    first, second = caplog.messages
    assert first.startswith("pool grew by 2.0 MiB from NumberedMemory in 0.")
    assert second.endswith("s, to 4.0 MiB in 2 slabs")


def test_a_large_request_gets_a_slab_of_its_own() -> None:
    source = NumberedMemory()
    pool = SlabPool(source, slab_bytes=MIB)
    region = pool.allocate(5 * MIB + 1)
    assert pool.slab(region) == Region(region.ptr, 5 * MIB + 4096)
    assert source.live == {pool.slab(region)}


def test_a_large_resident_has_a_slab_of_its_own_and_a_small_one_has_not() -> None:
    source = NumberedMemory()
    pool = SlabPool(source, slab_bytes=4 * MIB, capacity=16 * MIB)
    passing = pool.allocate(MIB)
    large, small = pool.allocate(2 * MIB + 1, resident=True), pool.allocate(2 * MIB, resident=True)
    assert pool.slab(large) == Region(large.ptr, 2 * MIB + 4096)
    assert pool.slab(small) == pool.slab(passing)
    pool.deallocate(large)
    assert pool.allocate(2 * MIB + 1, resident=True) == large, "its slab is there for the next one of that size"
    assert pool.stats().source_calls == 2


def test_a_large_resident_shares_a_slab_where_there_is_no_capacity_for_its_own() -> None:
    pool = SlabPool(NumberedMemory(), slab_bytes=4 * MIB, capacity=8 * MIB)
    pool.preallocate(8 * MIB)
    large = pool.allocate(3 * MIB, resident=True)
    assert pool.slab(large).nbytes == 8 * MIB
    assert pool.stats().source_calls == 1


def test_a_large_resident_shares_a_slab_where_the_source_has_none_for_it(caplog: pytest.LogCaptureFixture) -> None:
    source = NumberedMemory()
    pool = SlabPool(source, slab_bytes=4 * MIB)
    pool.preallocate(4 * MIB)
    source.refuse = OSError("no pages to lock")
    assert pool.slab(pool.allocate(3 * MIB, resident=True)).nbytes == 4 * MIB
    assert "a resident region of 3.0 MiB shares a slab with others" in caplog.text


def test_preallocated_memory_is_all_there_before_the_first_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tiered_mem.allocators")
    source = NumberedMemory()
    pool = SlabPool(source, slab_bytes=4 * MIB, capacity=10 * MIB)
    pool.preallocate(10 * MIB)
    assert [slab.nbytes for slab in source.live] == [10 * MIB], "in one slab, which wastes least"
    pool.preallocate(10 * MIB)
    for _ in range(10):
        pool.allocate(MIB)
    assert pool.stats().source_calls == 1
    assert caplog.messages[0].startswith("pool has 10.0 MiB from NumberedMemory in 0.")
    with pytest.raises(ValueError, match=r"cannot preallocate 10\.0 MiB in a pool of at most 10\.0 MiB"):
        pool.preallocate(10 * MIB + 1)


def test_what_a_source_gives_before_it_runs_dry_is_kept() -> None:
    source = LimitedMemory(NumberedMemory(), 5 * MIB)
    pool = SlabPool(source, slab_bytes=16 * MIB)
    with pytest.raises(OutOfHostMemory, match=r"did not give a slab of 1\.0 MiB"):
        pool.preallocate(16 * MIB)
    stats = pool.stats()
    assert stats.reserved == 5 * MIB, "16 and 8 are refused, 4 given, 12 to 1.5 refused, 1 given, and then no more"
    assert stats.source_failures == stats.source_calls - stats.slabs > 5
    pool.allocate(4 * MIB)


class Powers(NumberedMemory):
    """Gives powers of two only, as torch does, and at most `most` bytes at a time."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def allocate(self, nbytes: int) -> Region:
        assert nbytes == self.footprint(nbytes), "what the source rounds up to would be lost"
        if nbytes > self.most:
            raise OutOfHostMemory("too much at a time", "Ask for less", nbytes, 0)
        return super().allocate(nbytes)

    def footprint(self, nbytes: int) -> int:
        return 1 << (nbytes - 1).bit_length()


def test_a_source_that_rounds_up_is_asked_for_what_it_rounds_to() -> None:
    source = Powers(GIB)
    pool = SlabPool(source, slab_bytes=48 * MIB, capacity=48 * MIB)
    pool.preallocate(48 * MIB)
    assert sorted(slab.nbytes for slab in source.live) == [16 * MIB, 32 * MIB]
    odd = SlabPool(source, slab_bytes=51 * MIB, capacity=51 * MIB)
    odd.preallocate(51 * MIB)
    assert odd.stats().reserved == 48 * MIB, "3 MiB would be 4"
    with pytest.raises(OutOfHostMemory, match="can never fit"):
        SlabPool(source, capacity=48 * MIB).allocate(33 * MIB)


def test_a_source_that_refuses_a_slab_is_asked_for_smaller_ones(caplog: pytest.LogCaptureFixture) -> None:
    source = Powers(4 * MIB)
    pool = SlabPool(source, slab_bytes=16 * MIB)
    assert pool.slab(pool.allocate(3 * MIB)).nbytes == 4 * MIB
    stats = pool.stats()
    assert (stats.source_calls, stats.source_failures, stats.failures) == (3, 2, 0)
    assert "Trying 8.0 MiB" in caplog.text
    with pytest.raises(OutOfHostMemory, match=r"did not give a slab of 8\.0 MiB: too much at a time"):
        pool.allocate(5 * MIB)


def test_a_slab_that_the_source_does_not_take_back_does_not_make_way() -> None:
    source = NumberedMemory()
    pool = SlabPool(source, slab_bytes=MIB, capacity=4 * MIB)
    for region in [pool.allocate(MIB) for _ in range(4)]:
        pool.deallocate(region)
    source.refuse_back = RuntimeError("device lost")
    with pytest.raises(OutOfHostMemory, match="did not take back an empty slab: device lost") as caught:
        pool.allocate(2 * MIB)
    assert caught.value.needed == 2 * MIB
    assert pool.stats().reserved == 4 * MIB
    source.refuse_back = None
    pool.allocate(2 * MIB)


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


def test_a_capacity_that_leaves_less_than_a_slab() -> None:
    pool = SlabPool(NumberedMemory(), slab_bytes=2 * MIB, capacity=3 * MIB + 4095)
    assert pool.stats().capacity == 3 * MIB
    pool.allocate(2 * MIB)
    last = pool.allocate(MIB // 2)
    assert pool.slab(last).nbytes == MIB
    pool.allocate(MIB // 2)
    with pytest.raises(OutOfHostMemory):
        pool.allocate(1)


def test_slabs_grow_with_what_is_asked_and_hold_whole_requests() -> None:
    pool = SlabPool(NumberedMemory(), slab_bytes=64 * MIB)
    sizes = [pool.slab(pool.allocate(nbytes)).nbytes for nbytes in (1, 3 * MIB, 5 * MIB, 60 * MIB)]
    assert sizes == [2 * MIB, 24 * MIB, 24 * MIB, 60 * MIB], "there is room for the third in the second's"
    small = SlabPool(NumberedMemory(), slab_bytes=10 * MIB)
    sizes = [small.slab(small.allocate(nbytes * MIB)).nbytes for nbytes in (3, 4, 4)]
    assert sizes == [9 * MIB, 9 * MIB, 8 * MIB], "10 MiB are nearest to three of 3, and to two of 4"


def test_a_slab_is_no_larger_than_the_capacity() -> None:
    pool = SlabPool(NumberedMemory(), slab_bytes=GIB, capacity=MIB)
    assert pool.slab(pool.allocate(1)).nbytes == MIB


def test_what_can_never_fit_and_what_does_not_fit_now() -> None:
    pool = SlabPool(NumberedMemory(), slab_bytes=GIB, capacity=2 * GIB)
    with pytest.raises(OutOfHostMemory, match="can never fit") as never:
        pool.allocate(3 * GIB)
    numbers = "needed 3.00 GiB, free 2.00 GiB, largest free 2.00 GiB, used 0 B, limit 2.00 GiB"
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


def test_empty_slabs_make_way_for_a_request_that_needs_a_larger_one() -> None:
    source = NumberedMemory()
    pool = SlabPool(source, slab_bytes=MIB, capacity=4 * MIB)
    regions = [pool.allocate(MIB) for _ in range(4)]
    for region in regions[1:]:
        pool.deallocate(region)
    with pytest.raises(OutOfHostMemory, match="does not fit into the pool now"):
        pool.allocate(3 * MIB + 1)
    assert pool.stats().slabs == 4, "a request that fails all the same must not cost the pool its slabs"
    assert pool.slab(pool.allocate(2 * MIB)).nbytes == 2 * MIB
    assert sorted(slab.nbytes for slab in source.live) == [MIB, MIB, 2 * MIB]


def test_trim_returns_wholly_empty_slabs_only() -> None:
    source = NumberedMemory()
    pool = SlabPool(source, slab_bytes=MIB)
    regions = [pool.allocate(MIB // 2) for _ in range(6)]
    for region in regions[1:4]:
        pool.deallocate(region)
    assert pool.trim() == MIB
    assert source.live == {pool.slab(regions[0]), pool.slab(regions[5])}
    assert (pool.stats().reserved, pool.stats().slabs) == (2 * MIB, 2)
    assert pool.trim() == 0
    assert pool.stats().largest_free == MIB // 2


def test_trim_keeps_what_the_source_would_not_take_back() -> None:
    source = NumberedMemory()
    pool = SlabPool(source, slab_bytes=MIB)
    region = pool.allocate(MIB)
    pool.deallocate(region)
    source.refuse_back = RuntimeError("device lost")
    with pytest.raises(RuntimeError, match="device lost"):
        pool.trim()
    assert (pool.stats().reserved, pool.stats().largest_free) == (MIB, MIB)
    source.refuse_back = None
    assert pool.allocate(MIB) == region
    pool.deallocate(region)
    pool.close()
    assert not source.live


@pytest.mark.parametrize("refusal", [OSError("no pages to lock"), MemoryError("gone"), RuntimeError("x")])
def test_a_source_that_fails_leaves_the_pool_as_it_was(refusal: Exception) -> None:
    source = NumberedMemory()
    pool = SlabPool(source, slab_bytes=2 * MIB)
    pool.allocate(MIB // 2)
    region = pool.allocate(MIB)
    before = pool.stats()
    source.refuse = refusal
    with pytest.raises(OutOfHostMemory, match=r"NumberedMemory did not give a slab of 2\.0 MiB") as caught:
        pool.allocate(MIB)
    assert caught.value.__cause__ is refusal
    text = str(caught.value)
    assert str(refusal) in text
    assert "needed 1.0 MiB, free 512.0 KiB, largest free 512.0 KiB, used 1.5 MiB, no limit set" in text
    after = pool.stats()
    assert (after.failures, after.source_calls) == (1, before.source_calls + 1)
    assert (after.reserved, after.used, after.slabs) == (before.reserved, before.used, before.slabs)
    assert pool.allocate(MIB // 2).ptr == region.ptr + region.nbytes
    source.refuse = None
    pool.allocate(MIB)
    assert pool.stats().slabs == 2


def test_an_interrupt_while_the_source_works_leaves_the_pool_usable() -> None:
    class Interrupted(NumberedMemory):
        def allocate(self, nbytes: int) -> Region:
            if not self.live:
                self.live.add(Region(0, 0))
                raise KeyboardInterrupt
            return super().allocate(nbytes)

    pool = SlabPool(Interrupted(), slab_bytes=MIB)
    with pytest.raises(KeyboardInterrupt):
        pool.allocate(1)
    assert (pool.stats().slabs, pool.stats().used) == (0, 0)
    pool.deallocate(pool.allocate(MIB))
    pool.close()


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

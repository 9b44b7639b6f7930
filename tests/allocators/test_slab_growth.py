"""SlabPool: one case for each thing it promises of the slabs that it takes and gives back."""

from __future__ import annotations

import logging
import weakref
from dataclasses import replace

import pytest

from tests.allocators.numbered_memory import NumberedMemory
from tiered_mem.allocators import Region, SlabPool
from tiered_mem.allocators.base import OutOfHostMemory

MIB = 1 << 20
GIB = 1 << 30


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


def test_a_capacity_that_is_not_whole_units_can_be_preallocated() -> None:
    source = NumberedMemory()
    pool = SlabPool(source, capacity=3 * MIB + 4095)
    pool.preallocate(3 * MIB + 4095)
    assert [slab.nbytes for slab in source.live] == [3 * MIB]
    with pytest.raises(ValueError, match="cannot preallocate"):
        pool.preallocate(3 * MIB + 4096)


def test_slabs_are_whole_units_where_a_16th_of_one_is_not() -> None:
    source = NumberedMemory(26 * 4096 - 1)
    pool = SlabPool(source, slab_bytes=17 * 4096)
    with pytest.raises(OutOfHostMemory):
        pool.preallocate(32 * 4096)
    assert pool.stats().reserved == 24 * 4096, "16 and 8 are given, and of the rest nothing"


def test_what_a_source_gives_before_it_runs_dry_is_kept() -> None:
    source = NumberedMemory(5 * MIB)
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


def test_a_refusal_keeps_nothing_alive(no_gc: None) -> None:
    """Not even where a handler keeps the records of the log, as pytest's does."""
    pool = SlabPool(NumberedMemory(5 * MIB), slab_bytes=16 * MIB)
    refused = 0
    for attempt in (pool.preallocate, pool.allocate):
        try:
            attempt(16 * MIB)
        except OutOfHostMemory:
            refused += 1
    assert refused == 2
    gone = weakref.ref(pool)
    del pool, attempt
    assert gone() is None


def test_slabs_that_were_not_used_for_some_rounds_are_given_back_and_no_others() -> None:
    source = NumberedMemory()
    pool = SlabPool(source, slab_bytes=2 * MIB)
    regions = [pool.allocate(2 * MIB) for _ in range(4)]
    for region in regions[:3]:
        pool.deallocate(region)
    for _ in range(3):
        pool.begin_round()
        pool.deallocate(pool.allocate(2 * MIB))  # always in the same of the three
    assert pool.trim(unused_for=4) == 0
    assert pool.trim(1, unused_for=3) == 2 * MIB, "one is enough"
    assert pool.trim(unused_for=3) == 2 * MIB, "the fourth slab is not empty, and one is in use"
    assert pool.trim(unused_for=3) == 0
    assert pool.trim() == 2 * MIB
    assert len(source.live) == 1


def test_what_a_source_lacks_may_lie_in_the_pool_in_pieces() -> None:
    source = NumberedMemory(8 * MIB)
    pool = SlabPool(source, slab_bytes=2 * MIB)
    small = [pool.allocate(2 * MIB) for _ in range(4)]
    for region in small[1:]:
        pool.deallocate(region)
    assert pool.allocate(6 * MIB).nbytes == 6 * MIB
    assert {slab.nbytes for slab in source.live} == {2 * MIB, 6 * MIB}
    with pytest.raises(OutOfHostMemory, match=r"did not give a slab of 2\.0 MiB: dry"):
        pool.allocate(2 * MIB)


def test_a_source_that_says_what_it_has_left_is_asked_for_that() -> None:
    class Telling(NumberedMemory):
        def allocate(self, nbytes: int) -> Region:
            try:
                return super().allocate(nbytes)
            except OutOfHostMemory as error:
                raise replace(error, free=11 * MIB - error.used) from None

    source = Telling(11 * MIB)
    pool = SlabPool(source, slab_bytes=8 * MIB)
    for _ in range(11):
        pool.allocate(MIB)
    assert sorted(slab.nbytes for slab in source.live) == [3 * MIB, 8 * MIB]
    assert pool.stats().source_failures == 1

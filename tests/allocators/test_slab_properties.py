"""SlabPool against a model that keeps nothing but the list of live regions."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.allocators.numbered_memory import NumberedMemory
from tiered_mem.allocators import Region, SlabPool
from tiered_mem.allocators.base import OutOfHostMemory

UNIT = 4096


def units(nbytes: int) -> int:
    return (nbytes + UNIT - 1) // UNIT


class PoolMachine(RuleBasedStateMachine):
    @initialize(slab=st.integers(1, 16), capacity=st.none() | st.integers(1, 48))
    def start(self, slab: int, capacity: int | None) -> None:
        self.source = NumberedMemory()
        self.slab_units = slab
        self.capacity = capacity
        self.pool = SlabPool(self.source, slab * UNIT, None if capacity is None else capacity * UNIT)
        self.live: list[Region] = []
        self.peak = self.failures = 0

    def gaps(self) -> list[tuple[int, int]]:
        """Every free range as (address, units), worked out from the slabs and the live regions."""
        gaps = []
        for slab in self.source.live:
            at = slab.ptr
            for region in sorted((r for r in self.live if self.pool.slab(r) == slab), key=lambda r: r.ptr):
                gaps.append((at, (region.ptr - at) // UNIT))
                at = region.ptr + units(region.nbytes) * UNIT
            gaps.append((at, (slab.ptr + slab.nbytes - at) // UNIT))
        return [gap for gap in gaps if gap[1]]

    def reserved(self) -> int:
        return sum(slab.nbytes for slab in self.source.live) // UNIT

    def empty(self) -> int:
        used = {self.pool.slab(region) for region in self.live}
        return sum(slab.nbytes for slab in self.source.live - used) // UNIT

    def can_grow(self, wanted: int) -> bool:
        return self.capacity is None or wanted <= self.capacity - self.reserved() + self.empty()

    @rule(nbytes=st.integers(1, 20 * UNIT), dry=st.sampled_from([False, False, False, True]))
    def allocate(self, nbytes: int, dry: bool) -> None:
        wanted = units(nbytes)
        gaps = dict(self.gaps())
        fitting = [size for size in gaps.values() if size >= wanted]
        slabs = set(self.source.live)
        expected = bool(fitting) or (self.can_grow(wanted) and not dry)
        self.source.refuse = OSError("dry") if dry else None
        if not expected:
            with pytest.raises(OutOfHostMemory) as caught:
                self.pool.allocate(nbytes)
            assert caught.value.needed == wanted * UNIT
            self.failures += 1
            self.source.refuse = None
            return
        region = self.pool.allocate(nbytes)
        self.source.refuse = None
        assert region.nbytes == nbytes
        if fitting:
            assert gaps[region.ptr] == min(fitting), "not the smallest gap that holds the request"
            assert self.source.live == slabs, "the pool grew although there was room"
        else:
            (new,) = self.source.live - slabs
            assert new == self.pool.slab(region)
            assert new.nbytes >= wanted * UNIT
            assert new.nbytes <= max(self.slab_units + wanted / 2, wanted) * UNIT
        self.live.append(region)
        self.peak = max(self.peak, sum(units(r.nbytes) for r in self.live))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def deallocate(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.live) - 1))
        self.pool.deallocate(self.live.pop(index))

    @precondition(lambda self: self.gaps())
    @rule()
    def take_the_largest_gap(self) -> None:
        calls = self.pool.stats().source_calls
        self.live.append(self.pool.allocate(max(size for _, size in self.gaps()) * UNIT))
        self.peak = max(self.peak, sum(units(r.nbytes) for r in self.live))
        assert self.pool.stats().source_calls == calls

    @rule(share=st.floats(0, 1))
    def preallocate(self, share: float) -> None:
        nbytes = int((self.capacity or 48) * share) * UNIT
        if nbytes == 0:
            return
        before = self.reserved()
        self.pool.preallocate(nbytes)
        assert self.reserved() == max(before, nbytes // UNIT)

    @rule()
    def trim(self) -> None:
        expected = self.empty()
        assert self.pool.trim() == expected * UNIT
        assert self.empty() == 0

    @invariant()
    def regions_stay_apart_and_inside_their_slab(self) -> None:
        end = 0
        for region in sorted(self.live, key=lambda r: r.ptr):
            assert region.ptr % UNIT == 0
            assert region.ptr >= end
            end = region.ptr + region.nbytes
            slab = self.pool.slab(region)
            assert slab in self.source.live
            assert slab.ptr <= region.ptr
            assert end <= slab.ptr + slab.nbytes

    @invariant()
    def counters_add_up(self) -> None:
        stats = self.pool.stats()
        assert stats.used == sum(units(r.nbytes) for r in self.live) * UNIT
        assert stats.reserved == self.reserved() * UNIT
        assert stats.slabs == len(self.source.live)
        assert stats.largest_free == max((size for _, size in self.gaps()), default=0) * UNIT
        assert stats.peak == self.peak * UNIT
        assert stats.failures == self.failures
        if self.capacity is not None:
            assert stats.capacity == self.capacity * UNIT
            assert stats.reserved <= stats.capacity

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        while self.live:
            self.pool.deallocate(self.live.pop())
        self.counters_add_up()
        self.pool.close()
        assert not self.source.live


TestSlabPool = PoolMachine.TestCase
TestSlabPool.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)

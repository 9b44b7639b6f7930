"""LimitedMemory: the shared contract, and what is particular to it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.allocators.numbered_memory import NumberedMemory
from tests.contracts import check_host_memory
from tiered_mem.allocators import LimitedMemory, OutOfHostMemory, PageableMemory, Region, SlabPool

MIB = 1 << 20


class Rounded(NumberedMemory):
    """Takes whole MiB."""

    def footprint(self, nbytes: int) -> int:
        return -(-nbytes // MIB) * MIB


def test_contract() -> None:
    source = PageableMemory()
    check_host_memory(lambda: LimitedMemory(source, 16 * MIB))
    source.close()


def test_contract_of_a_pool_over_it() -> None:
    limited = LimitedMemory(PageableMemory(), 16 * MIB)
    check_host_memory(lambda: SlabPool(limited, slab_bytes=4 * MIB))
    limited.close()


def test_the_last_byte_of_the_limit_can_be_had() -> None:
    memory = LimitedMemory(NumberedMemory(), 3 * MIB)
    memory.allocate(2 * MIB)
    memory.allocate(MIB)
    with pytest.raises(OutOfHostMemory, match="would exceed the limit on host memory"):
        memory.allocate(1)


def test_what_counts_is_what_the_source_takes() -> None:
    source = Rounded()
    memory = LimitedMemory(source, 3 * MIB)
    held = memory.allocate(MIB + 1)
    with pytest.raises(OutOfHostMemory) as caught:
        memory.allocate(MIB + 1)
    error = caught.value
    assert (error.needed, error.used, error.free, error.limit) == (2 * MIB, 2 * MIB, MIB, 3 * MIB)
    assert error.needed <= error.limit, "it may succeed once memory is freed"
    assert "needed 2.0 MiB, free 1.0 MiB, used 2.0 MiB, limit 3.0 MiB" in str(error)
    assert source.live == {held}
    memory.deallocate(held)
    memory.allocate(2 * MIB + 1)


def test_a_request_that_can_never_be_met_is_told_from_one_that_cannot_now() -> None:
    source = Rounded()
    memory = LimitedMemory(source, 3 * MIB)
    with pytest.raises(OutOfHostMemory, match=r"can never be met.*Raise limit_bytes") as caught:
        memory.allocate(3 * MIB + 1)
    assert caught.value.limit is not None
    assert caught.value.needed == 4 * MIB > caught.value.limit
    assert not source.live


def test_a_failing_source_takes_nothing_off_the_limit() -> None:
    source = NumberedMemory()
    memory = LimitedMemory(source, MIB)
    refusal = source.refuse = OutOfHostMemory("dry", "Wait", needed=MIB, used=0)
    for _ in range(2):
        with pytest.raises(OutOfHostMemory) as caught:
            memory.allocate(MIB)
        assert caught.value is refusal
    source.refuse = None
    held = memory.allocate(MIB)
    source.refuse_back = OSError("not now")
    with pytest.raises(OSError, match="not now"):
        memory.deallocate(held)
    with pytest.raises(OutOfHostMemory):
        memory.allocate(1)
    source.refuse_back = None
    memory.deallocate(held)
    memory.allocate(MIB)


def test_limits_can_be_nested() -> None:
    whole = LimitedMemory(NumberedMemory(), 3 * MIB)
    mine, yours = LimitedMemory(whole, 2 * MIB), LimitedMemory(whole, 2 * MIB)
    mine.allocate(2 * MIB)
    with pytest.raises(OutOfHostMemory, match=r"limit 3\.0 MiB"):
        yours.allocate(2 * MIB)
    yours.allocate(MIB)
    with pytest.raises(OutOfHostMemory, match=r"limit 2\.0 MiB"):
        mine.allocate(1)


def test_threads_together_keep_to_the_limit() -> None:
    class Meeting(NumberedMemory):
        """Holds its callers until as many as the limit allows are there."""

        def __init__(self) -> None:
            super().__init__()
            self.all_here = threading.Barrier(4)

        def allocate(self, nbytes: int) -> Region:
            self.all_here.wait(timeout=60)
            return super().allocate(nbytes)

    memory = LimitedMemory(Meeting(), 4 * MIB)

    def work() -> bool:
        try:
            memory.allocate(MIB)
        except OutOfHostMemory:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        had = [future.result() for future in [threads.submit(work) for _ in range(8)]]
    assert sum(had) == 4


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_must_be_positive(limit: int) -> None:
    with pytest.raises(ValueError, match=f"limit_bytes must be positive, got {limit}"):
        LimitedMemory(NumberedMemory(), limit)

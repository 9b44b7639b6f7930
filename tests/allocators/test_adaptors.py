"""What the adaptors have in common."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest

from tests.allocators.numbered_memory import NumberedMemory
from tiered_mem.allocators import (
    CountedMemory,
    HostMemory,
    LimitedMemory,
    PageableMemory,
    RecordedPool,
    Region,
    RetriedMemory,
    SlabPool,
)

MIB = 1 << 20

Make = Callable[[HostMemory], HostMemory]

ADAPTORS: dict[str, Make] = {
    "limited": lambda source: LimitedMemory(source, 16 * MIB),
    "counted": CountedMemory,
    "retried": lambda source: RetriedMemory(source, lambda nbytes: False),
    "recorded": lambda source: RecordedPool(SlabPool(source, MIB), io.StringIO()),
}
each = pytest.mark.parametrize("adaptor", ADAPTORS.values(), ids=ADAPTORS)


@each
def test_closing_neither_closes_the_source_nor_takes_memory_from_it(adaptor: Make) -> None:
    source = PageableMemory()
    other = source.allocate(4096)
    adaptor(source).close()
    source.deallocate(other)
    source.deallocate(source.allocate(4096))


@each
def test_a_region_of_the_source_is_not_the_adaptors(adaptor: Make) -> None:
    source = NumberedMemory()
    memory = adaptor(source)
    region = source.allocate(4096)
    with pytest.raises(ValueError, match=f"not allocated from this {type(memory).__name__}"):
        memory.deallocate(region)
    assert region in source.live


@pytest.mark.parametrize("adaptor", [ADAPTORS[name] for name in ("limited", "counted", "retried")])
def test_a_region_may_be_given_back_in_the_middle_of_another_ones_return(adaptor: Make) -> None:
    """As a `__del__` does it, which runs on the same thread at any point."""

    class Interrupted(NumberedMemory):
        def deallocate(self, region: Region) -> None:
            super().deallocate(region)
            if others:
                memory.deallocate(others.pop())

    source = Interrupted()
    memory = adaptor(source)
    first, *others = (memory.allocate(MIB) for _ in range(3))
    memory.deallocate(first)
    assert not source.live
    memory.deallocate(memory.allocate(16 * MIB))
    memory.close()


def test_a_region_may_be_given_back_while_another_one_is_written_to_the_trace() -> None:
    class Interrupted(io.StringIO):
        def write(self, text: str) -> int:
            written = super().write(text)
            if text.startswith("mark"):
                memory.deallocate(region)
            return written

    file = Interrupted()
    memory = RecordedPool(SlabPool(NumberedMemory(), MIB), file)
    region = memory.allocate(4096)
    memory.mark("step 0")
    assert file.getvalue().splitlines()[1:] == ["allocate 0 4096", "mark step 0", "deallocate 0"]
    memory.close()


def test_adaptors_compose() -> None:
    source = CountedMemory(LimitedMemory(PageableMemory(), 8 * MIB))
    pool = SlabPool(RetriedMemory(source, lambda nbytes: False), slab_bytes=4 * MIB)
    memory = RecordedPool(pool, io.StringIO())
    regions = [memory.allocate(2 * MIB) for _ in range(4)]
    assert source.counts().nbytes.current == 8 * MIB
    with pytest.raises(MemoryError, match=r"RetriedMemory did not give a slab .* limit 8\.0 MiB"):
        memory.allocate(2 * MIB)
    assert source.counts().failures >= 1
    for region in regions:
        memory.deallocate(region)
    memory.close()
    pool.close()
    source.close()

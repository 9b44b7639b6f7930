"""PageableMemory: the shared contract, and what is particular to it."""

from __future__ import annotations

import ctypes

from tests.allocators.mappings import is_mapped
from tests.contracts import check_host_memory, write_ends
from tiered_mem.allocators import PageableMemory


def test_contract() -> None:
    check_host_memory(PageableMemory)


def test_memory_begins_as_zeros() -> None:
    memory = PageableMemory()
    region = memory.allocate(3 << 20)
    assert ctypes.string_at(region.ptr, region.nbytes) == bytes(region.nbytes)
    memory.deallocate(region)


def test_deallocating_unmaps() -> None:
    memory = PageableMemory()
    regions = [memory.allocate(1 << 20) for _ in range(3)]
    for region in regions:
        write_ends(region, 1)
    assert [is_mapped(region.ptr) for region in regions] == [True, True, True]
    memory.deallocate(regions[1])
    assert [is_mapped(region.ptr) for region in regions] == [True, False, True]
    memory.deallocate(regions[0])
    memory.deallocate(regions[2])
    memory.close()

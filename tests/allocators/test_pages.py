"""Memory that is mapped: where it lies, when it is in RAM, and that nothing of it stays."""

from __future__ import annotations

import concurrent.futures
import ctypes
import logging
import mmap
import platform

import pytest

from tests.allocators.mappings import (
    flags_of,
    is_mapped,
    locked_bytes,
    mapped_bytes,
    needs_locked,
    node_policy_of,
    resident_pages,
)
from tests.allocators.unprivileged import MAY_LOCK, output_of
from tests.contracts import check_host_memory, write_ends
from tiered_mem.allocators import LockedMemory, PageableMemory

HUGE_PAGE = 2 << 20
SIZES = (1, 4096, HUGE_PAGE - 1, HUGE_PAGE, 5 * HUGE_PAGE + 4097)


def test_contract_of_pageable_memory() -> None:
    check_host_memory(PageableMemory)


def test_contract_of_locked_memory() -> None:
    needs_locked(32 << 20)
    check_host_memory(LockedMemory)


def test_memory_starts_on_a_huge_page() -> None:
    memory = PageableMemory()
    regions = [memory.allocate(nbytes) for nbytes in SIZES]
    assert [region.ptr % HUGE_PAGE for region in regions] == [0] * len(SIZES)
    for region in regions:
        memory.deallocate(region)


def test_what_was_mapped_to_align_is_unmapped_at_once() -> None:
    memory = PageableMemory()
    before = mapped_bytes()
    regions = [memory.allocate(1 << 20) for _ in range(64)]
    assert 64 << 20 <= mapped_bytes() - before < 96 << 20, "each region has 2 MiB to spare"
    for region in regions:
        memory.deallocate(region)
    assert mapped_bytes() - before < 32 << 20


def test_a_region_is_unmapped_to_its_last_page() -> None:
    memory = PageableMemory()
    for nbytes in SIZES:
        region = memory.allocate(nbytes)
        assert is_mapped(region.ptr)
        assert is_mapped(region.ptr + memory.footprint(nbytes) - 1)
        memory.deallocate(region)
        assert not is_mapped(region.ptr)
        assert not is_mapped(region.ptr + nbytes - 1)


def test_a_footprint_is_whole_pages_of_the_kernel() -> None:
    assert PageableMemory().footprint(1) == mmap.PAGESIZE
    assert PageableMemory().footprint(mmap.PAGESIZE + 1) == 2 * mmap.PAGESIZE


def test_huge_pages_are_asked_for() -> None:
    memory = PageableMemory()
    region = memory.allocate(4 * HUGE_PAGE)
    flags = flags_of(region.ptr)
    memory.deallocate(region)
    if "hg" not in flags and not _has_huge_pages():
        pytest.skip("this kernel has no transparent huge pages")
    assert "hg" in flags


def test_pageable_memory_takes_no_ram_before_it_is_written() -> None:
    memory = PageableMemory()
    region = memory.allocate(4 * HUGE_PAGE)
    assert not any(resident_pages(region.ptr, region.nbytes))
    ctypes.memset(region.ptr, 1, region.nbytes)
    assert all(resident_pages(region.ptr, region.nbytes))
    memory.deallocate(region)


@pytest.mark.parametrize("nbytes", SIZES)
def test_locked_memory_is_in_ram_to_its_last_page(nbytes: int) -> None:
    needs_locked(nbytes + HUGE_PAGE)
    memory = LockedMemory()
    before = locked_bytes()
    region = memory.allocate(nbytes)
    assert all(resident_pages(region.ptr, region.nbytes))
    assert locked_bytes() - before == memory.footprint(nbytes)
    assert ctypes.string_at(region.ptr, nbytes) == bytes(nbytes)
    memory.deallocate(region)
    assert locked_bytes() == before


def test_a_refused_lock_tells_the_limit_and_leaves_nothing() -> None:
    text = output_of("""
        memory = allocators.LockedMemory()
        before = mapped_bytes()
        try:
            memory.allocate(256 << 20)
        except allocators.base.OutOfHostMemory as error:
            print(error)
            print(error.limit, error.needed)
        print("unmapped:", mapped_bytes() - before < 128 << 20)
    """)
    assert (
        f"cannot lock 256.0 MiB in RAM (mlock: Cannot allocate memory); RLIMIT_MEMLOCK is {MAY_LOCK} bytes" in text
    )
    assert "ulimit -l" in text
    assert "CAP_IPC_LOCK" in text
    assert f"\n{MAY_LOCK} {256 << 20}\n" in text
    assert "unmapped: True" in text


def test_memory_that_could_not_be_touched_is_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_threads(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(concurrent.futures.ThreadPoolExecutor, "submit", no_threads)
    memory = LockedMemory()
    before = mapped_bytes()
    with pytest.raises(RuntimeError, match="can't start new thread"):
        memory.allocate(256 << 20)
    assert mapped_bytes() - before < 128 << 20
    memory.close()


def test_memory_is_asked_for_on_a_node() -> None:
    memory = PageableMemory(numa_node=0)
    plain = PageableMemory()
    region, other = memory.allocate(HUGE_PAGE), plain.allocate(HUGE_PAGE)
    assert node_policy_of(region.ptr) == "prefer:0"
    assert node_policy_of(other.ptr) == "default"
    memory.deallocate(region)
    plain.deallocate(other)


def test_a_refused_node_is_told_once_and_memory_comes_from_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    memory = PageableMemory(numa_node=1000)
    with caplog.at_level(logging.WARNING, logger="tiered_mem.allocators"):
        regions = [memory.allocate(1 << 20) for _ in range(3)]
    (record,) = caplog.records
    assert "not placed on NUMA node 1000: [Errno" in record.getMessage()
    assert "mbind" in record.getMessage()
    for region in regions:
        ctypes.memset(region.ptr, 1, region.nbytes)
        memory.deallocate(region)


def test_a_machine_whose_calls_are_not_known_places_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    memory = PageableMemory(numa_node=0)
    memory.deallocate(memory.allocate(1 << 20))
    assert "mbind is not known on riscv64" in caplog.text


def test_there_is_no_negative_node() -> None:
    with pytest.raises(ValueError, match="no NUMA node -1"):
        PageableMemory(numa_node=-1)


def _has_huge_pages() -> bool:
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled") as file:
            return "[never]" not in file.read()
    except OSError:
        return False


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

"""The suite that every source of host memory is put through."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest

from tiered_mem.allocators import HostMemory, Region
from tiered_mem.allocators.base import OutOfHostMemory


def check_host_memory(make: Callable[[], HostMemory]) -> None:
    """Put the `HostMemory` that `make` returns, which must have 16 MiB to give, through its protocol."""
    for check in (
        _memory_is_usable,
        _bad_sizes_are_refused,
        _foreign_and_freed_regions_are_refused,
        _impossible_requests_are_out_of_memory,
        _closing_with_live_regions_is_refused,
    ):
        memory = make()
        check(memory)
        memory.close()


def write_ends(region: Region, value: int) -> None:
    """Fill the first and the last up to 64 bytes of a region with `value`."""
    ends = min(region.nbytes, 64)
    ctypes.memset(region.ptr, value, ends)
    ctypes.memset(region.ptr + region.nbytes - ends, value, ends)


def ends_hold(region: Region, value: int) -> bool:
    """Whether both ends of a region still hold what `write_ends` put there."""
    ends = min(region.nbytes, 64)
    first = ctypes.string_at(region.ptr, ends)
    last = ctypes.string_at(region.ptr + region.nbytes - ends, ends)
    return first == last == bytes([value]) * ends


def _memory_is_usable(memory: HostMemory) -> None:
    sizes = [1, 4095, 4096, 4097, 1 << 20, (1 << 20) + 1, 5 << 20]
    regions = [memory.allocate(size) for size in sizes]
    assert [region.nbytes for region in regions] == sizes
    assert [region.ptr % 4096 for region in regions] == [0] * len(sizes)
    for value, region in enumerate(regions, start=1):
        write_ends(region, value)
    for value, region in enumerate(regions, start=1):
        assert ends_hold(region, value), f"{region} was written to by another region"

    memory.deallocate(regions.pop(2))
    again = memory.allocate(2 << 20)
    write_ends(again, 99)
    assert all(ends_hold(region, value) for region, value in zip(regions, (1, 2, 4, 5, 6, 7), strict=True))
    for region in [again, *regions]:
        memory.deallocate(Region(region.ptr, region.nbytes))  # a region is a value: an equal one will do


def _bad_sizes_are_refused(memory: HostMemory) -> None:
    for nbytes in (0, -1, -4096):
        with pytest.raises(ValueError, match=str(nbytes)):
            memory.allocate(nbytes)


def _foreign_and_freed_regions_are_refused(memory: HostMemory) -> None:
    region = memory.allocate(8192)
    strangers = [Region(region.ptr + 4096, 4096), Region(region.ptr, 4096), Region(4096, 8192)]
    for stranger in strangers:
        with pytest.raises(ValueError, match=f"{stranger.nbytes} bytes at {stranger.ptr:#x}"):
            memory.deallocate(stranger)
    write_ends(region, 7)
    assert ends_hold(region, 7)
    memory.deallocate(region)
    with pytest.raises(ValueError, match=f"{region.ptr:#x}"):
        memory.deallocate(region)


def _impossible_requests_are_out_of_memory(memory: HostMemory) -> None:
    memory.deallocate(memory.allocate(1 << 20))
    held = memory.allocate(1 << 20)
    write_ends(held, 5)
    for nbytes in (1 << 60, (1 << 64) + 4096):  # the second one is 4096 where sizes are cut to 64 bits
        with pytest.raises(OutOfHostMemory, match=r"needed .* used 1\.0 MiB") as caught:
            memory.allocate(nbytes)
        assert caught.value.needed == nbytes
        assert caught.value.used == 1 << 20
    assert ends_hold(held, 5)
    after = memory.allocate(1 << 20)
    memory.deallocate(after)
    memory.deallocate(held)


def _closing_with_live_regions_is_refused(memory: HostMemory) -> None:
    region = memory.allocate(3 << 20)
    write_ends(region, 3)
    with pytest.raises(RuntimeError, match=rf"1 region of 3\.0 MiB.*{region.ptr:#x}"):
        memory.close()
    assert ends_hold(region, 3)
    memory.deallocate(region)
    memory.close()
    memory.close()
    with pytest.raises(RuntimeError, match="closed"):
        memory.allocate(4096)

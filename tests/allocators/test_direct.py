"""DirectMemory: what all sources have from it."""

from __future__ import annotations

import pytest

from tiered_mem.allocators import Region
from tiered_mem.allocators.base import DirectMemory, OutOfHostMemory


class Shelf(DirectMemory[str]):
    """Addresses that nothing lies behind. `refuse` is raised in place of the next answer."""

    def __init__(self) -> None:
        super().__init__()
        self.refuse: Exception | None = None
        self.given_back: list[str] = []
        self._next = 4096

    def _obtain(self, nbytes: int) -> tuple[int, str]:
        self._fail()
        ptr = self._next
        self._next += self.footprint(nbytes)
        return ptr, f"ticket of {ptr}"

    def _give_back(self, region: Region, held: str) -> None:
        self._fail()
        self.given_back.append(held)

    def _fail(self) -> None:
        refuse, self.refuse = self.refuse, None
        if refuse is not None:
            raise refuse


def test_what_was_held_for_a_region_is_there_to_give_it_back() -> None:
    shelf = Shelf()
    first, second = shelf.allocate(10), shelf.allocate(20)
    shelf.deallocate(second)
    shelf.deallocate(first)
    assert shelf.given_back == [f"ticket of {second.ptr}", f"ticket of {first.ptr}"]


def test_a_region_that_could_not_be_given_back_stays_allocated() -> None:
    shelf = Shelf()
    region = shelf.allocate(10)
    shelf.refuse = RuntimeError("not now")
    with pytest.raises(RuntimeError, match="not now"):
        shelf.deallocate(region)
    with pytest.raises(RuntimeError, match="1 region of 10 B"):
        shelf.close()
    shelf.deallocate(region)
    shelf.close()


def test_out_of_memory_tells_what_is_asked_for_and_what_is_in_use() -> None:
    shelf = Shelf()
    cause = OSError("the cause")
    region = shelf.allocate(3 << 20)
    shelf.refuse = OutOfHostMemory("none left", "Buy some", needed=1, used=2, limit=5)
    shelf.refuse.__cause__ = cause
    with pytest.raises(
        OutOfHostMemory, match=r"none left .*needed 7.0 MiB, used 3.0 MiB, limit 5 B\). Buy"
    ) as caught:
        shelf.allocate(7 << 20)
    assert caught.value.__cause__ is cause
    shelf.deallocate(region)


def test_a_refused_request_counts_for_nothing() -> None:
    shelf = Shelf()
    shelf.refuse = RuntimeError("broken")
    with pytest.raises(RuntimeError, match="broken"):
        shelf.allocate(1 << 20)
    shelf.refuse = OutOfHostMemory("none left", "Buy some", needed=1, used=2)
    with pytest.raises(OutOfHostMemory, match="used 0 B"):
        shelf.allocate(1)
    shelf.close()


def test_a_region_takes_whole_pages() -> None:
    assert [Shelf().footprint(nbytes) for nbytes in (1, 4096, 4097)] == [4096, 4096, 8192]

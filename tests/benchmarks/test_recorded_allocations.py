"""RecordedPool and read_trace: what is written, and what is read back."""

from __future__ import annotations

import io

import pytest

from benchmarks.recorded import Allocated, Deallocated, Marked, RecordedPool, read_trace
from tests.allocators.numbered_memory import NumberedMemory
from tiered_mem.allocators import HostPool, Region, SlabPool
from tiered_mem.allocators.base import OutOfHostMemory

pytestmark = pytest.mark.once(why="it needs no device")

MIB = 1 << 20
HEAD = "allocation-trace 1\n"


def recorded(capacity: int | None = None) -> tuple[RecordedPool, SlabPool, io.StringIO]:
    file = io.StringIO()
    pool = SlabPool(NumberedMemory(), MIB, capacity)
    return RecordedPool(pool, file), pool, file


def test_each_operation_is_a_line() -> None:
    memory, _, file = recorded()
    state = memory.allocate(5000)
    memory.mark("step 0")
    first, second = memory.allocate(4096), memory.allocate(1)
    memory.deallocate(first)
    again = memory.allocate(8)
    assert again.ptr == first.ptr, "the numbers tell two regions at one address apart"
    for region in (second, again, state):
        memory.deallocate(region)
    lines = [
        "allocation-trace 1",
        "allocate 0 5000",
        "mark step 0",
        "allocate 1 4096",
        "allocate 2 1",
        "deallocate 1",
        "allocate 3 8",
        "deallocate 2",
        "deallocate 3",
        "deallocate 0",
    ]
    assert file.getvalue() == "\n".join(lines) + "\n"


def test_what_was_written_is_read_back() -> None:
    memory, _, file = recorded()
    region = memory.allocate(5000)
    memory.mark("step 1: warm-up")
    memory.deallocate(region)
    memory.allocate(7)
    file.seek(0)
    assert list(read_trace(file)) == [
        Allocated(0, 5000),
        Marked("step 1: warm-up"),
        Deallocated(0),
        Allocated(1, 7),
    ]


def test_what_it_does_not_record_is_the_pools_own() -> None:
    recorder, pool, _ = recorded()
    memory: HostPool = recorder
    region = memory.allocate(4096)
    assert memory.slab(region) == pool.slab(region)
    assert memory.stats() == pool.stats()
    memory.deallocate(region)
    assert memory.trim() == MIB
    memory.close()
    pool.allocate(1)


def test_requests_that_fail_are_not_written() -> None:
    memory, _, file = recorded(capacity=MIB)
    with pytest.raises(OutOfHostMemory):
        memory.allocate(2 * MIB)
    with pytest.raises(ValueError, match="must be positive"):
        memory.allocate(0)
    with pytest.raises(ValueError, match="not allocated from this SlabPool"):
        memory.deallocate(Region(4096, 1))
    assert file.getvalue() == HEAD


@pytest.mark.parametrize("name", ["", " ", "two\nlines", "step\n", "a\u2028b"])
def test_a_mark_is_one_line_of_text(name: str) -> None:
    memory, _, file = recorded()
    with pytest.raises(ValueError, match="a mark is one line of text"):
        memory.mark(name)
    assert file.getvalue() == HEAD


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "line 1: an allocation trace begins with 'allocation-trace 1', not with ''"),
        ("allocation-trace 2\n", "line 1: .* not with 'allocation-trace 2'"),
        (HEAD + "allocate 0 8\nfree 0\n", "line 3: 'free 0' is no operation"),
        (HEAD + "\n", "line 2: '' is no operation"),
        (HEAD + "mark\n", "line 2: 'mark' is no operation"),
        (HEAD + "allocate 0\n", "line 2: 'allocate 0' is no operation"),
        (HEAD + "allocate 0 8 forever\n", "line 2: 'allocate 0 8 forever' is no operation"),
        (HEAD + "allocate 0 -8\n", "line 2: '-8' is no whole number"),
        (HEAD + "allocate 0 8.0\n", "line 2: '8.0' is no whole number"),
        (HEAD + "allocate 0 0\n", "line 2: region 0 has no bytes"),
        (HEAD + "mark a\nallocate 0 8\nallocate 0 8\n", "line 4: region 0 is allocated already"),
        (HEAD + "allocate 0 8\ndeallocate 1\n", "line 3: region 1 is not allocated"),
        (HEAD + "allocate 0 8\ndeallocate 0\ndeallocate 0\n", "line 4: region 0 is not allocated"),
    ],
)
def test_what_is_no_trace_is_told_with_its_line(lines: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        list(read_trace(io.StringIO(lines)))


def test_a_trace_is_read_as_it_comes() -> None:
    operations = read_trace(io.StringIO(HEAD + "mark a\nnonsense\n"))
    assert next(operations) == Marked("a")
    with pytest.raises(ValueError, match="line 3"):
        next(operations)

"""RecordedPool and read_trace: the shared contract, what is written, and what is read back."""

from __future__ import annotations

import contextlib
import io
from concurrent.futures import Future, ThreadPoolExecutor, wait

import pytest

from tests.allocators.numbered_memory import NumberedMemory
from tests.allocators.threads import sum_over_threads
from tests.contracts import check_host_memory
from tiered_mem.allocators import (
    Allocated,
    Deallocated,
    HostPool,
    Marked,
    OutOfHostMemory,
    PageableMemory,
    RecordedPool,
    Region,
    SlabPool,
    read_trace,
)

MIB = 1 << 20
HEAD = "allocation-trace 1\n"


def recorded(capacity: int | None = None) -> tuple[RecordedPool, SlabPool, io.StringIO]:
    file = io.StringIO()
    pool = SlabPool(NumberedMemory(), MIB, capacity)
    return RecordedPool(pool, file), pool, file


def test_contract() -> None:
    pool = SlabPool(PageableMemory(), slab_bytes=4 * MIB)
    check_host_memory(lambda: RecordedPool(pool, io.StringIO()))
    pool.close()


def test_each_operation_is_a_line() -> None:
    memory, _, file = recorded()
    state = memory.allocate(5000, resident=True)
    memory.mark("step 0")
    first, second = memory.allocate(4096), memory.allocate(1)
    memory.deallocate(first)
    again = memory.allocate(8)
    assert again.ptr == first.ptr, "the numbers tell two regions at one address apart"
    for region in (second, again, state):
        memory.deallocate(region)
    lines = [
        "allocation-trace 1",
        "allocate 0 5000 resident",
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
    region = memory.allocate(5000, resident=True)
    memory.mark("step 1: warm-up")
    memory.deallocate(region)
    memory.allocate(7)
    file.seek(0)
    assert list(read_trace(file)) == [
        Allocated(0, 5000, resident=True),
        Marked("step 1: warm-up"),
        Deallocated(0),
        Allocated(1, 7),
    ]


def test_the_pool_is_asked_what_the_recorder_is() -> None:
    asked: list[tuple[int, bool]] = []

    class Noting(SlabPool):
        def allocate(self, nbytes: int, *, resident: bool = False) -> Region:
            asked.append((nbytes, resident))
            return super().allocate(nbytes, resident=resident)

    pool = Noting(NumberedMemory(), MIB)
    memory: HostPool = RecordedPool(pool, io.StringIO())
    region = memory.allocate(4096, resident=True)
    other = memory.allocate(4097)
    assert asked == [(4096, True), (4097, False)]
    assert memory.slab(region) == pool.slab(region)
    assert memory.stats() == pool.stats()
    assert memory.footprint(1) == 4096
    memory.deallocate(region)
    memory.deallocate(other)
    assert memory.trim() == MIB
    assert pool.stats().reserved == 0


def test_requests_that_fail_are_not_written() -> None:
    memory, _, file = recorded(capacity=MIB)
    with pytest.raises(OutOfHostMemory):
        memory.allocate(2 * MIB)
    with pytest.raises(ValueError, match="must be positive"):
        memory.allocate(0)
    with pytest.raises(ValueError, match="not allocated from this RecordedPool"):
        memory.deallocate(Region(4096, 1))
    assert file.getvalue() == HEAD


def test_a_region_of_the_pool_that_was_not_recorded_is_refused() -> None:
    memory, pool, file = recorded()
    region = pool.allocate(4096)
    for ask in (memory.deallocate, memory.slab):
        with pytest.raises(ValueError, match="not allocated from this RecordedPool"):
            ask(region)
    assert file.getvalue() == HEAD


def test_a_file_that_cannot_be_written_leaks_nothing() -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            if full:
                raise OSError("no space left on device")
            return super().write(text)

    full = False
    pool = SlabPool(NumberedMemory(), MIB)
    memory = RecordedPool(pool, Full())
    region = memory.allocate(4096)
    full = True
    with pytest.raises(OSError, match="no space left"):
        memory.allocate(4096)
    assert pool.stats().used == 4096
    with pytest.raises(OSError, match="no space left"):
        memory.deallocate(region)
    assert pool.stats().used == 0
    memory.close()


@pytest.mark.parametrize("name", ["", " ", "two\nlines", "step\n", "a\u2028b"])
def test_a_mark_is_one_line_of_text(name: str) -> None:
    memory, _, file = recorded()
    with pytest.raises(ValueError, match="a mark is one line of text"):
        memory.mark(name)
    assert file.getvalue() == HEAD


def test_memory_is_returned_in_the_trace_before_another_thread_has_it() -> None:
    class Held(io.StringIO):
        """Holds up the line of a return until another thread has the memory, or for a moment if it cannot."""

        def write(self, text: str) -> int:
            if text.startswith("deallocate"):
                futures.append(threads.submit(memory.allocate, MIB))
                wait(futures, timeout=0.2)
            return super().write(text)

    file = Held()
    futures: list[Future[Region]] = []
    memory = RecordedPool(SlabPool(NumberedMemory(), MIB, MIB), file)
    with ThreadPoolExecutor(1) as threads:
        first = memory.allocate(MIB)
        memory.deallocate(first)
        second = futures[0].result()
    assert first == second
    assert file.getvalue().splitlines()[1:] == ["allocate 0 1048576", "deallocate 0", "allocate 1 1048576"]


def test_a_trace_of_threads_gives_no_memory_to_two() -> None:
    """The order of the lines is one in which a single thread could have asked the pool."""
    file = io.StringIO()
    pool = SlabPool(NumberedMemory(), 3 * 4096, 3 * 4096)
    memory = RecordedPool(pool, file)

    def work(_: int) -> int:
        had = 0
        for _ in range(2000):
            with contextlib.suppress(OutOfHostMemory):
                memory.deallocate(memory.allocate(4096))
                had += 1
        return had

    had = sum_over_threads(work, 6)
    file.seek(0)
    live: set[int] = set()
    numbers = set()
    for operation in read_trace(file):
        assert not isinstance(operation, Marked)
        live ^= {operation.number}
        numbers.add(operation.number)
        assert len(live) <= 3, "more than the pool has room for"
    assert not live
    assert numbers == set(range(had))
    memory.close()


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

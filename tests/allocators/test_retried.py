"""RetriedMemory: the shared contract, and what is particular to it."""

from __future__ import annotations

import pytest

from tests.allocators.numbered_memory import NumberedMemory
from tests.contracts import check_host_memory
from tiered_mem.allocators import LimitedMemory, OutOfHostMemory, PageableMemory, RetriedMemory

MIB = 1 << 20


def test_contract() -> None:
    source = PageableMemory()
    check_host_memory(lambda: RetriedMemory(source, lambda nbytes: False))
    source.close()


def test_memory_that_is_freed_is_had_at_the_next_try() -> None:
    """What is freed may be the very regions of this memory: no lock is held meanwhile."""
    asked: list[int] = []

    def free_the_oldest(nbytes: int) -> bool:
        asked.append(nbytes)
        if held:
            memory.deallocate(held.pop(0))
        return True

    memory = RetriedMemory(LimitedMemory(NumberedMemory(), 4 * MIB), free_the_oldest)
    held = [memory.allocate(MIB) for _ in range(4)]
    region = memory.allocate(3 * MIB)
    assert asked == [3 * MIB] * 3
    assert len(held) == 1
    memory.deallocate(region)
    memory.deallocate(held.pop())
    memory.close()


def test_the_limit_may_be_put_over_it_as_well() -> None:
    def free(nbytes: int) -> bool:
        limited.deallocate(held.pop())
        source.refuse = None
        return True

    source = NumberedMemory()
    limited = LimitedMemory(RetriedMemory(source, free), 4 * MIB)
    held = [limited.allocate(MIB)]
    source.refuse = OutOfHostMemory("dry", "Wait", needed=MIB, used=MIB)
    held.append(limited.allocate(MIB))
    assert source.live == set(held)


def test_the_error_is_the_sources_own_when_nothing_is_left_to_free() -> None:
    source = NumberedMemory()
    refusal = source.refuse = OutOfHostMemory("dry", "Wait", needed=MIB, used=0)
    answers = [True, True, False]
    memory = RetriedMemory(source, lambda nbytes: answers.pop(0))
    with pytest.raises(OutOfHostMemory) as caught:
        memory.allocate(MIB)
    assert caught.value is refusal
    assert not answers
    source.refuse = None
    memory.allocate(MIB)


def test_nothing_is_freed_for_a_request_that_can_never_be_met() -> None:
    asked: list[int] = []
    memory = RetriedMemory(LimitedMemory(NumberedMemory(), MIB), lambda nbytes: asked.append(nbytes) or True)
    with pytest.raises(OutOfHostMemory, match="can never be met"):
        memory.allocate(MIB + 1)
    assert not asked


def test_other_errors_of_the_source_are_passed_on_at_once() -> None:
    asked: list[int] = []
    source = NumberedMemory()
    source.refuse = OSError("broken")
    with pytest.raises(OSError, match="broken"):
        RetriedMemory(source, lambda nbytes: asked.append(nbytes) or True).allocate(1)
    assert not asked


def test_an_error_of_the_callers_function_is_passed_on() -> None:
    def fail(nbytes: int) -> bool:
        raise KeyError(nbytes)

    source = NumberedMemory()
    source.refuse = OutOfHostMemory("dry", "Wait", needed=8, used=0)
    memory = RetriedMemory(source, fail)
    with pytest.raises(KeyError):
        memory.allocate(8)
    source.refuse = None
    memory.deallocate(memory.allocate(8))
    memory.close()

"""AclPinnedMemory on Ascend's runtime, real or emulated."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from emulator.tests.acl import PINNED, Acl
from tests.contracts import check_host_memory, ends_hold, write_ends
from tiered_mem.allocators import AclPinnedMemory, Region, SlabPool
from tiered_mem.allocators.acl import AclError
from tiered_mem.allocators.base import OutOfHostMemory

RUNTIME = "libascendcl.so"


@pytest.fixture
def cann() -> None:
    """Skips where no runtime can be loaded, neither a real nor an emulated one."""
    try:
        ctypes.CDLL(RUNTIME)
    except OSError as missing:
        pytest.skip(f"there is no CANN here, real or emulated: {missing}")


@pytest.fixture
def memory(cann: None) -> Iterator[AclPinnedMemory]:
    memory = AclPinnedMemory(RUNTIME)
    yield memory
    memory.close()


def is_pinned(ptr: int) -> bool:
    """Whether the runtime itself says that the memory at `ptr` is pinned host memory."""
    return Acl().kind_of(ptr) == PINNED


@pytest.mark.usefixtures("cann")
def test_contract() -> None:
    check_host_memory(lambda: AclPinnedMemory(RUNTIME))


def test_contract_of_a_pool_over_it(memory: AclPinnedMemory) -> None:
    check_host_memory(lambda: SlabPool(memory, slab_bytes=8 << 20))


@pytest.mark.usefixtures("cann")
def test_the_library_is_found_by_its_name() -> None:
    AclPinnedMemory().close()


def test_memory_is_pinned_while_it_is_allocated(memory: AclPinnedMemory) -> None:
    region = memory.allocate(3 << 20)
    assert is_pinned(region.ptr)
    assert is_pinned(region.ptr + region.nbytes - 1)
    memory.deallocate(region)
    assert not is_pinned(region.ptr)


def test_a_refused_request_leaves_no_error_behind(memory: AclPinnedMemory) -> None:
    peek = ctypes.CDLL(RUNTIME).aclrtPeekAtLastError
    assert peek(0) == 0
    with pytest.raises(OutOfHostMemory, match=r"ACL code 207001.*needed 1048576\.0 TiB, used 0 B"):
        memory.allocate(1 << 60)
    assert peek(0) == 0


def test_a_runtime_that_gives_unaligned_memory(memory: AclPinnedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    # The runtime promises 64 bytes only. Its own memory, moved up by 64 bytes, is the worst of these.
    malloc, free = memory._malloc, memory._free
    given: dict[int, int] = {}

    def malloc_off_by_64(pointer: ctypes._CArgObject, nbytes: int) -> int:
        code: int = malloc(pointer, nbytes + 64)
        target = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_void_p)).contents
        target.value = (target.value or 0) + 64
        given[target.value] = nbytes
        return code

    def free_off_by_64(ptr: int) -> int:
        del given[ptr]
        code: int = free(ptr - 64)
        return code

    monkeypatch.setattr(memory, "_malloc", malloc_off_by_64)
    monkeypatch.setattr(memory, "_free", free_off_by_64)
    region = memory.allocate(8192)
    assert (region.ptr % 4096, region.nbytes) == (0, 8192)
    ((raw, nbytes),) = given.items()
    assert raw <= region.ptr
    assert region.ptr + region.nbytes <= raw + nbytes
    write_ends(region, 9)
    assert ends_hold(region, 9)
    memory.deallocate(region)
    assert not given


def test_a_failing_free_is_told_and_can_be_repeated(
    memory: AclPinnedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    region = memory.allocate(1 << 20)
    free = memory._free
    with monkeypatch.context() as patch:
        patch.setattr(memory, "_free", lambda ptr: free(ptr + 4096))  # not the start of an allocation
        with pytest.raises(AclError, match=r"aclrtFreeHost failed with ACL code \d{6} for 1.0 MiB") as caught:
            memory.deallocate(region)
    assert (caught.value.function, caught.value.nbytes) == ("aclrtFreeHost", 1 << 20)
    assert caught.value.code != 0
    assert f": {caught.value.detail}. Look the code up" in str(caught.value)
    memory.deallocate(region)


@pytest.mark.parametrize("code", [107002, 507899])
def test_other_failures_are_not_out_of_memory(
    memory: AclPinnedMemory, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(memory, "_malloc", lambda pointer, nbytes: code)
    with pytest.raises(AclError, match=rf"aclrtMallocHost failed with ACL code {code} for 4.0 KiB"):
        memory.allocate(4096)
    pool = SlabPool(memory, slab_bytes=1 << 20)
    with pytest.raises(OutOfHostMemory, match=rf"AclPinnedMemory did not give .* ACL code {code}"):
        pool.allocate(1)


def test_a_null_pointer_is_not_memory(memory: AclPinnedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_malloc", lambda pointer, nbytes: 0)
    with pytest.raises(AclError, match="null pointer"):
        memory.allocate(4096)


def test_a_region_of_another_source_is_refused(memory: AclPinnedMemory) -> None:
    other = AclPinnedMemory(RUNTIME)
    region = other.allocate(4096)
    with pytest.raises(ValueError, match="not allocated from this AclPinnedMemory"):
        memory.deallocate(Region(region.ptr, region.nbytes))
    other.deallocate(region)
    other.close()


def test_a_missing_library_is_told_at_construction() -> None:
    with pytest.raises(OSError, match=r"cannot load Ascend's runtime 'libnothere\.so'.*PageableMemory"):
        AclPinnedMemory("libnothere.so")


def test_a_library_without_the_functions_is_told_at_construction() -> None:
    with pytest.raises(OSError, match=r"'libc\.so\.6' has no function aclrtMallocHost"):
        AclPinnedMemory("libc.so.6")

"""RegisteredMemory, with the registrars of the real or emulated NPU."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import ascend_emulator
import pytest
import torch
from ascend_emulator.hardware import real_cann

from emulator.tests.acl import PAGEABLE, PINNED, Acl
from tests.allocators.mappings import is_mapped, locked_bytes, needs_locked, resident_pages
from tests.allocators.native import library
from tests.allocators.unprivileged import MAY_LOCK, output_of
from tests.conftest import needs_npurt
from tests.contracts import check_host_memory, ends_hold, write_ends
from tiered_mem.allocators import Region, SlabPool
from tiered_mem.allocators.acl import AclError, AclRegistrar, AclRuntime
from tiered_mem.allocators.base import OutOfHostMemory
from tiered_mem.allocators.runtime import RegisteredMemory, Registrar
from tiered_mem.tiers.pinning import NpurtRegistrar

pytestmark = pytest.mark.skipif(
    os.environ.get("TIERED_MEM_TEST_DEVICE", "npu") != "npu", reason="needs Ascend's runtime, real or emulated"
)
CHUNK = 1 << 20
BOTH = pytest.mark.parametrize("make_registrar", [AclRegistrar, pytest.param(NpurtRegistrar, marks=needs_npurt)])
MakeRegistrar = Callable[[], Registrar]


class Watched:
    """Asks another registrar, and remembers what is registered. An unregistration can be told to fail."""

    def __init__(self, registrar: Registrar) -> None:
        self._registrar = registrar
        self.chunks: dict[int, int] = {}
        self.asked: list[int] = []
        self.refuse_back_after: int | None = None

    def register(self, ptr: int, nbytes: int) -> None:
        self.asked.append(ptr)
        self._registrar.register(ptr, nbytes)
        self.chunks[ptr] = nbytes

    def unregister(self, ptr: int) -> None:
        if self.refuse_back_after == 0:
            self._registrar.unregister(ptr + 64)  # where nothing is registered
        if self.refuse_back_after is not None:
            self.refuse_back_after -= 1
        self._registrar.unregister(ptr)
        del self.chunks[ptr]


@pytest.fixture
def faults() -> Iterator[Callable[[str], None]]:
    """Tells calls of the emulated runtime to fail. Afterwards none does."""
    if real_cann() is not None:
        pytest.skip("only the emulated runtime can be told to fail")
    yield ascend_emulator.inject
    ascend_emulator.clear_faults()


@pytest.fixture(autouse=True)
def runtime_is_ready() -> None:
    torch.npu.set_device(0)


def kinds_of(region: Region) -> set[int]:
    """What the runtime says of the first and the last byte of each chunk, and of those between."""
    starts = range(region.ptr, region.ptr + region.nbytes, CHUNK)
    ends = (min(start + CHUNK, region.ptr + region.nbytes) - 1 for start in starts)
    return {Acl().kind_of(ptr) for ptr in (*starts, *ends)}


def remembered_error() -> int:
    code: int = ctypes.CDLL("libascendcl.so").aclrtPeekAtLastError(0)
    return code


@BOTH
@pytest.mark.parametrize("chunk_bytes", [4096, CHUNK, 64 << 30])
def test_contract(make_registrar: MakeRegistrar, chunk_bytes: int) -> None:
    check_host_memory(lambda: RegisteredMemory(make_registrar(), chunk_bytes=chunk_bytes))


@BOTH
def test_contract_of_a_pool_over_it(make_registrar: MakeRegistrar) -> None:
    memory = RegisteredMemory(make_registrar())
    check_host_memory(lambda: SlabPool(memory, slab_bytes=8 << 20))
    memory.close()


@BOTH
def test_all_of_a_region_is_pinned_while_it_is_allocated(make_registrar: MakeRegistrar) -> None:
    memory = RegisteredMemory(make_registrar(), chunk_bytes=CHUNK)
    region = memory.allocate(3 * CHUNK + 5000)
    assert kinds_of(region) == {PINNED}
    memory.deallocate(region)
    assert kinds_of(region) == {PAGEABLE}
    assert not is_mapped(region.ptr)
    memory.close()


@BOTH
def test_torch_takes_it_for_pinned_memory(make_registrar: MakeRegistrar) -> None:
    memory = RegisteredMemory(make_registrar())
    region = memory.allocate(CHUNK)
    tensor = torch.frombuffer((ctypes.c_char * region.nbytes).from_address(region.ptr), dtype=torch.uint8)
    assert tensor.is_pinned()
    on_device = torch.arange(CHUNK, device="npu").to(torch.uint8)
    tensor.copy_(on_device, non_blocking=True)
    torch.npu.synchronize()
    assert torch.equal(tensor, on_device.cpu())
    memory.deallocate(region)


def test_a_region_is_registered_in_chunks_of_whole_pages() -> None:
    registrar = Watched(AclRegistrar())
    memory = RegisteredMemory(registrar, chunk_bytes=CHUNK)
    region = memory.allocate(2 * CHUNK + 1)
    assert registrar.chunks == {
        region.ptr: CHUNK,
        region.ptr + CHUNK: CHUNK,
        region.ptr + 2 * CHUNK: memory.footprint(1),
    }
    memory.deallocate(region)
    assert registrar.chunks == {}


def test_memory_is_in_ram_and_locked_to_its_last_page() -> None:
    needs_locked(16 << 20)
    memory = RegisteredMemory(AclRegistrar())
    before = locked_bytes()
    region = memory.allocate((9 << 20) + 1)
    assert all(resident_pages(region.ptr, region.nbytes))
    assert locked_bytes() - before == memory.footprint(region.nbytes)
    memory.deallocate(region)
    assert locked_bytes() == before


@BOTH
def test_a_failure_between_chunks_leaves_nothing(
    make_registrar: MakeRegistrar, faults: Callable[[str], None]
) -> None:
    registrar = Watched(make_registrar())
    memory = RegisteredMemory(registrar, chunk_bytes=CHUNK)
    held = memory.allocate(CHUNK)
    write_ends(held, 5)
    registrar.asked.clear()
    faults("aclrtHostRegister:2")
    with pytest.raises(OutOfHostMemory, match=r"ACL code 207001.*told to fail.*needed 3.0 MiB, used 1.0 MiB"):
        memory.allocate(3 * CHUNK)
    first, second = registrar.asked
    assert second == first + CHUNK
    assert {Acl().kind_of(first), Acl().kind_of(second)} == {PAGEABLE}
    assert not is_mapped(first)
    assert not is_mapped(second)
    assert remembered_error() == 0
    assert registrar.chunks == {held.ptr: CHUNK}
    assert ends_hold(held, 5)
    again = memory.allocate(3 * CHUNK)
    memory.deallocate(again)
    memory.deallocate(held)
    memory.close()


@BOTH
def test_a_failure_that_is_not_of_memory_keeps_its_name(
    make_registrar: MakeRegistrar, faults: Callable[[str], None]
) -> None:
    memory = RegisteredMemory(make_registrar(), chunk_bytes=CHUNK)
    faults("aclrtHostRegister:2,code=507899")
    with pytest.raises(AclError, match=r"HostRegister\w* failed with ACL code 507899 for 1.0 MiB .*told to fail"):
        memory.allocate(3 * CHUNK)
    assert remembered_error() == 0
    memory.close()


@BOTH
def test_a_failing_unregistration_can_be_repeated(make_registrar: MakeRegistrar) -> None:
    registrar = Watched(make_registrar())
    memory = RegisteredMemory(registrar, chunk_bytes=CHUNK)
    region = memory.allocate(3 * CHUNK)
    registrar.refuse_back_after = 1
    with pytest.raises(AclError, match=r"HostUnregister failed with ACL code \d+: "):
        memory.deallocate(region)
    assert remembered_error() == 0
    assert len(registrar.chunks) == 2
    write_ends(region, 3)  # it is still mapped
    with pytest.raises(RuntimeError, match=r"1 region of 3\.0 MiB"):
        memory.close()
    registrar.refuse_back_after = None
    memory.deallocate(region)  # the runtime would refuse to unregister a chunk twice
    assert registrar.chunks == {}
    memory.close()


def test_memory_that_stays_registered_stays_mapped(
    faults: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    registrar = Watched(AclRegistrar())
    memory = RegisteredMemory(registrar, chunk_bytes=CHUNK)
    registrar.refuse_back_after = 0
    faults("aclrtHostRegister:3")
    with caplog.at_level(logging.ERROR, "tiered_mem.allocators"), pytest.raises(OutOfHostMemory, match="told to"):
        memory.allocate(3 * CHUNK)
    first = registrar.asked[0]
    assert f"{3 * CHUNK} bytes at {first:#x} stay mapped" in caplog.text
    assert is_mapped(first)
    registrar.refuse_back_after = None
    for ptr in list(registrar.chunks):
        registrar.unregister(ptr)


@pytest.mark.parametrize("chunk_bytes", [0, -4096, 4097])
def test_chunks_are_whole_pages(chunk_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"whole pages of .* not {chunk_bytes}"):
        RegisteredMemory(AclRegistrar(), chunk_bytes=chunk_bytes)


def test_memory_that_may_not_be_locked_is_registered_all_the_same_and_told_once() -> None:
    text = output_of("""
        class Anything:
            def register(self, ptr, nbytes): print("registered", nbytes, all(resident_pages(ptr, nbytes)))
            def unregister(self, ptr): pass
        memory = RegisteredMemory(Anything())
        for region in [memory.allocate(1 << 20), memory.allocate(2 << 20)]:
            memory.deallocate(region)
    """)
    assert f"registered {1 << 20} True\nregistered {2 << 20} True\n" in text
    assert text.count("registered memory is not locked: cannot lock 1.0 MiB in RAM") == 1
    assert text.count("not locked") == 1
    assert f"RLIMIT_MEMLOCK is {MAY_LOCK} bytes, at most {MAY_LOCK} bytes" in text
    assert "ulimit -l" in text


OLD_RUNTIME = """
#include <cstdint>
extern "C" {
int live = 0;
int aclrtHostRegister(void*, uint64_t size, int type, void** device) {
  if (type != 0 || size % 4096 != 0) return 107000;
  *device = &live;
  ++live;
  return 0;
}
int aclrtHostUnregister(void*) { return live-- > 0 ? 0 : 107000; }
int aclrtDeviceGetPCIBusId(int device, char* text, int size) {
  if (device != 0 || size < 13) return 207000;
  for (const char* from = "0000:3d:00.0"; (*text++ = *from++);) {}
  return 0;
}
}
"""


NEW_RUNTIME = """
#include <cstdint>
extern "C" {
uint32_t flags = 0;
int aclrtHostRegister(void*, uint64_t, int, void**) { return 107000; }
int aclrtHostRegisterV2(void*, uint64_t, uint32_t given) { flags = given; return 0; }
int aclrtHostUnregister(void*) { return 0; }
}
"""
MAPPED, TO_BE_PINNED = 0x2, 0x10000000  # ACL_HOST_REG_MAPPED, ACL_HOST_REG_PINNED


def test_memory_is_registered_as_mapped_and_pinned(tmp_path: Path) -> None:
    path = library(tmp_path, "libnew.so", NEW_RUNTIME)
    AclRegistrar(path).register(4096, 4096)
    assert ctypes.c_uint32.in_dll(ctypes.CDLL(path), "flags").value == MAPPED | TO_BE_PINNED
    calls: list[tuple[int, int, int]] = []
    NpurtRegistrar(SimpleNamespace(npuHostRegister=lambda *call: calls.append(call) or 0)).register(4096, 8192)
    assert calls == [(4096, 8192, MAPPED | TO_BE_PINNED)]


def test_an_old_runtime_registers_by_the_elder_function(tmp_path: Path) -> None:
    path = library(tmp_path, "libold.so", OLD_RUNTIME)
    live = ctypes.c_int.in_dll(ctypes.CDLL(path), "live")
    memory = RegisteredMemory(AclRegistrar(path), chunk_bytes=CHUNK)
    region = memory.allocate(2 * CHUNK + 1)
    assert live.value == 3
    memory.deallocate(region)
    assert live.value == 0


def test_a_library_that_cannot_register_is_told_at_construction() -> None:
    with pytest.raises(OSError, match=r"'libc\.so\.6' has no function aclrtHostRegister"):
        AclRegistrar("libc.so.6")


def test_a_runtime_tells_where_a_device_is_on_the_bus_if_it_can(tmp_path: Path) -> None:
    runtime = AclRuntime(library(tmp_path, "libold.so", OLD_RUNTIME))
    assert runtime.pci_bus_id(0) == "0000:3d:00.0"
    assert runtime.pci_bus_id(1) is None
    assert AclRuntime("libc.so.6").pci_bus_id(0) is None

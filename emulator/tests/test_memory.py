"""Device memory, pinned host memory and the errors that CANN's calls return."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import ascend_emulator
import pytest
import torch

from emulator.tests.acl import D2H, DEVICE, H2D, PAGEABLE, PINNED, Acl, byte_at, fill
from emulator.tests.launch import EMULATOR, run, write_script

MIB = 1 << 20
INVALID, NO_DEVICE, NO_STREAM = 107000, 107001, 107003
UNSUPPORTED, NO_MEMORY, NOT_FREED = 207000, 207001, 207002
ONLY_PINNED = 0x10000000


def block(nbytes: int) -> torch.Tensor:
    """A tensor that takes that much from the device; torch_npu adds 32 bytes to what is asked for."""
    return torch.empty(nbytes - 32, dtype=torch.uint8, device="npu")


@pytest.fixture
def leave_free() -> Iterator[Callable[[int], None]]:
    """Sets the device's capacity so that this much is free, for this test."""
    _, capacity = torch.npu.mem_get_info()

    def set_capacity(nbytes: int) -> None:
        torch.npu.empty_cache()
        free, total = torch.npu.mem_get_info()
        ascend_emulator.configure(hbm_bytes=total - free + nbytes)

    yield set_capacity
    ascend_emulator.configure(hbm_bytes=capacity)


def test_out_of_memory_is_torchs_own_at_the_set_capacity(leave_free: Callable[[int], None]) -> None:
    leave_free(64 * MIB)
    kept = block(40 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 40\.00 MiB.* 24\.00 MiB free"):
        block(40 * MIB)
    del kept
    block(40 * MIB)


def test_memory_comes_back() -> None:
    torch.npu.empty_cache()
    before = torch.npu.mem_get_info()
    tensor = block(64 * MIB)
    free, total = torch.npu.mem_get_info()
    assert (before[0] - free, total) == (64 * MIB, before[1])
    del tensor
    torch.npu.empty_cache()
    assert torch.npu.mem_get_info() == before


def test_the_capacity_is_the_one_that_was_set(leave_free: Callable[[int], None]) -> None:
    kept = block(20 * MIB)
    leave_free(48 * MIB)
    free, total = torch.npu.mem_get_info()
    assert free == 48 * MIB
    ascend_emulator.configure(hbm_bytes=1)  # less than is taken: nothing is free, and nothing is below zero
    assert torch.npu.mem_get_info() == (0, 1)
    ascend_emulator.configure(hbm_bytes=total)
    assert torch.npu.mem_get_info() == (free, total)
    assert kept.numel() > 0


BAD_CALLS = {
    "aclrtFree of foreign memory": (("aclrtFree", 4096), NOT_FREED, "not a device allocation"),
    "aclrtMalloc of 0 bytes": (("aclrtMalloc", "result", 0, 0), INVALID, "0 bytes"),
    "aclrtMalloc of too much": (("aclrtMalloc", "result", 1 << 50, 0), NO_MEMORY, "needed 1073741824.0 MiB, free"),
    "aclrtMallocHost of 0 bytes": (("aclrtMallocHost", "result", 0), INVALID, "0 bytes"),
    "aclrtMallocHost of too much": (("aclrtMallocHost", "result", 1 << 60), NO_MEMORY, "the host cannot map"),
    "aclrtMallocHost of -1 bytes": (("aclrtMallocHost", "result", 2**64 - 1), NO_MEMORY, "the host cannot map"),
    "aclrtFreeHost of foreign memory": (("aclrtFreeHost", 4096), NOT_FREED, "not memory of aclrtMallocHost"),
    "aclrtHostRegister misaligned": (("aclrtHostRegister", 64, 4096, 0, "result"), INVALID, "multiple of 4096"),
    "aclrtHostRegister of 0 bytes": (("aclrtHostRegister", 4096, 0, 0, "result"), INVALID, "some bytes"),
    "aclrtHostUnregister of foreign memory": (("aclrtHostUnregister", 4096), INVALID, "not registered"),
    "aclrtMemcpy with too little room": (("aclrtMemcpy", 0, 1, 0, 2, 1), INVALID, "more bytes than"),
    "aclrtMemcpyAsync host to host": (("aclrtMemcpyAsync", 0, 1, 0, 1, 0, 0), UNSUPPORTED, "host to host"),
    "aclrtMemset with too little room": (("aclrtMemset", 0, 1, 0, 2), INVALID, "more bytes than"),
    "aclrtSetDevice 1": (("aclrtSetDevice", 1), NO_DEVICE, "no device 1 among the 1"),
    "aclrtMallocPhysical": (("aclrtMallocPhysical", "result"), UNSUPPORTED, "aclrtMallocPhysical is not emulated"),
    "aclrtSynchronizeStream of no stream": (("aclrtSynchronizeStream", 4096), NO_STREAM, "not a stream"),
    "aclrtDestroyStream of the default": (("aclrtDestroyStream", 0), NO_STREAM, "not a stream"),
    "aclrtSynchronizeEvent of no event": (("aclrtSynchronizeEvent", 4096), INVALID, "not an event"),
    "aclrtDestroyEvent of no event": (("aclrtDestroyEvent", 4096), INVALID, "not an event"),
    "aclrtMemsetAsync on no stream": (("aclrtMemsetAsync", 0, 0, 0, 0, 4096), NO_STREAM, "memset: not a stream"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_calls_return_the_acl_code_and_leave_a_message(acl: Acl, case: str) -> None:
    (function, *arguments), code, message = BAD_CALLS[case]
    result = ctypes.c_size_t()
    assert acl.call(function, *(ctypes.byref(result) if each == "result" else each for each in arguments)) == code
    assert message in acl.message()
    assert not result.value
    assert [acl.call("aclrtPeekAtLastError", 0), acl.call("aclrtGetLastError", 0)] == [code, code]
    assert acl.call("aclrtPeekAtLastError", 0) == 0


def test_memory_is_freed_once(acl: Acl) -> None:
    device, host = acl.malloc(4096), acl.malloc_host(4096)
    acl.check("aclrtFree", device)
    acl.check("aclrtFreeHost", host)
    assert acl.call("aclrtFree", device) == NOT_FREED
    assert acl.call("aclrtFreeHost", host) == NOT_FREED


def test_the_runtime_tells_where_memory_lies(acl: Acl) -> None:
    nbytes = 3 * MIB + 5
    with acl.buffers(nbytes) as (device, host):
        for start, kind in ((device, DEVICE), (host, PINNED)):
            assert [acl.kind_of(start + offset) for offset in (0, nbytes - 1)] == [kind, kind]
            assert acl.kind_of(start - 1) != kind
            assert acl.kind_of(start + nbytes) != kind
    assert [acl.kind_of(device), acl.kind_of(host)] == [PAGEABLE, PAGEABLE]


def test_registered_memory_is_pinned(acl: Acl) -> None:
    room = (ctypes.c_uint8 * (5 * 4096))()
    start = -(-ctypes.addressof(room) // 4096) * 4096
    on_device = ctypes.c_size_t()
    acl.check("aclrtHostRegister", start + 4096, 8192, 0, ctypes.byref(on_device))
    assert on_device.value == start + 4096
    kinds = [acl.kind_of(start + offset) for offset in (4095, 4096, 3 * 4096 - 1, 3 * 4096)]
    assert kinds == [PAGEABLE, PINNED, PINNED, PAGEABLE]

    # A part of it again, or more than it: then a part would have two owners.
    for first, pages in ((1, 2), (2, 1), (0, 2), (0, 4)):
        assert acl.call("aclrtHostRegisterV2", start + first * 4096, pages * 4096, 0) == INVALID
        assert "pinned already" in acl.message()
    assert acl.call("aclrtFreeHost", start + 4096) == NOT_FREED  # not aclrtMallocHost's

    acl.check("aclrtHostUnregister", start + 4096)
    assert acl.kind_of(start + 4096) == PAGEABLE


def test_what_is_only_pinned_may_begin_anywhere(acl: Acl) -> None:
    room = (ctypes.c_uint8 * 4096)()
    start = ctypes.addressof(room) // 64 * 64 + 64 + 8
    acl.check("aclrtHostRegisterV2", start, 80, ONLY_PINNED)
    assert [acl.kind_of(start + offset) for offset in (-1, 0, 79, 80)] == [PAGEABLE, PINNED, PINNED, PAGEABLE]
    acl.check("aclrtHostUnregister", start)
    assert acl.kind_of(start) == PAGEABLE


def test_the_device_may_be_shown_a_part_of_the_runtimes_own_pinned_memory(acl: Acl) -> None:
    host = acl.malloc_host(3 * 4096)
    start = -(-host // 4096) * 4096
    on_device = ctypes.c_size_t()
    acl.check("aclrtHostRegister", start, 4096, 0, ctypes.byref(on_device))
    assert on_device.value == start
    assert (
        acl.call("aclrtHostRegister", start, 4 * 4096, 0, ctypes.byref(on_device)) == INVALID
    )  # more than is its own
    acl.check("aclrtHostUnregister", start)
    assert acl.call("aclrtHostUnregister", start) == INVALID
    assert acl.kind_of(start) == PINNED
    acl.check("aclrtFreeHost", host)


def test_torch_recognises_pinned_memory_of_others(acl: Acl) -> None:
    with acl.buffers(MIB) as (_, host):
        memory = (ctypes.c_uint8 * MIB).from_address(host)
        assert torch.frombuffer(memory, dtype=torch.uint8).is_pinned()
        assert torch.frombuffer(memory, dtype=torch.uint8)[4096:].is_pinned()
    assert not torch.empty(MIB, dtype=torch.uint8).is_pinned()


@pytest.mark.slow(why="a process imports torch")
def test_capacity_and_stack_of_the_launcher(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import ctypes
        import torch
        print(torch.npu.mem_get_info())
        try:
            torch.empty(80 << 20, dtype=torch.uint8, device="npu")
        except torch.OutOfMemoryError as error:
            print("64.00 MiB total capacity" in str(error))
        pointer = ctypes.c_void_p()
        assert ctypes.CDLL("libascendcl.so").aclrtMallocHost(ctypes.byref(pointer), ctypes.c_size_t(4096)) == 0
        memory = (ctypes.c_uint8 * 4096).from_address(pointer.value)
        print(torch.frombuffer(memory, dtype=torch.uint8).is_pinned(), torch.empty(8).pin_memory().is_pinned())
        """,
    )
    done = run(*EMULATOR, "--hbm", "64MiB", "--stack", "old", script, cwd=tmp_path)
    # An old stack recognises as pinned only what torch pinned itself.
    assert done.stdout == f"({64 * MIB}, {64 * MIB})\nTrue\nFalse True\n", done.stderr


def test_memory_freed_under_a_queued_copy_does_not_end_the_process(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import ctypes
        from ctypes import byref, c_size_t, c_void_p

        acl, nbytes = ctypes.CDLL("libascendcl.so"), c_size_t(8 << 20)

        def made(function, *arguments):
            pointer = c_void_p()
            assert function(byref(pointer), *arguments) == 0
            return pointer

        for free_first in ("host", "device"):
            device, host = made(acl.aclrtMalloc, nbytes, 0), made(acl.aclrtMallocHost, nbytes)
            assert acl.aclrtMemcpyAsync(host, nbytes, device, nbytes, 2, None) == 0
            frees = [lambda: acl.aclrtFreeHost(host), lambda: acl.aclrtFree(device)]
            if free_first == "device":
                frees.reverse()
            print([free() for free in frees], acl.aclrtSynchronizeDevice())
        """,
    )
    done = run(*EMULATOR, "--d2h", "40MB/s", script, cwd=tmp_path)
    assert done.stdout == "[0, 0] 0\n" * 2, (done.returncode, done.stderr)


@pytest.mark.schedules("eager", "late", why="its copies run when they like")
@pytest.mark.usefixtures("careless")
def test_freed_pinned_memory_loses_its_bytes(acl: Acl) -> None:
    nbytes = 8 * MIB
    with acl.buffers(nbytes) as (device, source), acl.streams(1) as (stream,):
        fill(source, 7, nbytes)
        ascend_emulator.inject("endless_h2d:1")
        acl.copy(H2D, device, source, nbytes, stream)
        doomed = acl.malloc_host(nbytes)
        fill(doomed, 9, nbytes)
        acl.copy(H2D, device, doomed, nbytes, stream)  # begins when the first copy is done
        acl.check("aclrtFreeHost", doomed)
        ascend_emulator.clear_faults()
        acl.check("aclrtSynchronizeStream", stream)
        acl.copy(D2H, source, device, 4096, stream)
        acl.check("aclrtSynchronizeStream", stream)
        assert byte_at(source) == 0xA0  # neither 7 nor 9: the careless program computes with something else


@pytest.mark.parametrize("make", [Acl.malloc, Acl.malloc_host])
def test_new_memory_is_poisoned(acl: Acl, make: Callable[[Acl, int], int]) -> None:
    """From the first byte to the last, and past the size of any cache."""
    nbytes = MIB + 2
    pointer = make(acl, nbytes)
    contents = ctypes.string_at(pointer, nbytes)
    acl.check("aclrtFree" if make is Acl.malloc else "aclrtFreeHost", pointer)
    assert contents == b"\xa0\x7f" * (nbytes // 2)
    as_floats = torch.frombuffer(bytearray(contents[: nbytes // 4 * 4]), dtype=torch.float32)
    halves = (as_floats.view(torch.bfloat16), as_floats.view(torch.float16))
    assert all(numbers.isnan().all() for numbers in (as_floats, *halves))


def test_memory_that_was_freed_is_refused(acl: Acl) -> None:
    device, host = acl.malloc(MIB), acl.malloc_host(MIB)
    acl.check("aclrtFree", device)
    with acl.streams(1) as (stream,):
        for call in (
            ("aclrtMemcpyAsync", device, MIB, host, MIB, H2D, stream),
            ("aclrtMemcpy", host, MIB, device, MIB, D2H),
            ("aclrtMemsetAsync", device, MIB, 0, MIB, stream),
            ("aclrtMemset", device, MIB, 0, MIB),
        ):
            assert acl.call(*call) == INVALID
            assert "memory that was freed" in acl.message()
    acl.check("aclrtFreeHost", host)

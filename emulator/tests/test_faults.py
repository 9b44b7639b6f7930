"""Calls that fail because they were told to, and a device that is lost."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import ascend_emulator
import pytest
import torch
from ascend_emulator import EmulatorError, Fault

from emulator.tests.acl import H2D, PINNED, Acl, Attributes, Batch, byte_at, fill
from emulator.tests.launch import EMULATOR, run, write_script

NO_MEMORY, NOT_FREED, NO_EVENT, NO_STREAM = 207001, 207002, 207007, 207008
INTERNAL, LOST, DRIVER = 507000, 507010, 507899
NBYTES = 4096


@pytest.fixture
def acl() -> Iterator[Acl]:
    yield Acl()
    ascend_emulator.clear_faults()


TEXTS = {
    "aclrtMallocHost:3": Fault("aclrtMallocHost", nth=3),
    "aclrtMemcpyAsync:p=0.01,seed=7": Fault("aclrtMemcpyAsync", probability=0.01, seed=7),
    "aclrtMemcpy:p=1.0": Fault("aclrtMemcpy", probability=1),
    "aclrtCreateEvent:p=1e-06,code=5": Fault("aclrtCreateEvent", probability=1e-6, code=5),
    "aclnnGelu:2": Fault("aclnnGelu", nth=2),
    "device:100,code=507899": Fault("device", nth=100, code=507899),
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_fault_and_its_text(text: str) -> None:
    assert Fault.parse(text) == TEXTS[text]
    assert str(TEXTS[text]) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "aclrtMalloc", "aclrtMalloc:", "aclrtMalloc:-1", "aclrtMalloc:x", "aclrtMalloc:3;", " aclrtMalloc:3"),
        *("aclrtMalloc:p=", "aclrtMalloc:p=1.2.3", "aclrtMalloc:p=1,code=x", "aclrtMalloc:3,p=1"),
        "aclrtMalloc:3,seed=1",
    ],
)
def test_what_is_not_a_fault(text: str) -> None:
    with pytest.raises(EmulatorError, match="is not a fault") as caught:
        Fault.parse(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"function": "aclrtMallocHostWithCfg", "nth": 1},
            "'aclrtMallocHostWithCfg' cannot be told to fail; known ",
        ),
        ({"function": "aclrtMalloc"}, "a fault of aclrtMalloc needs either nth or a probability"),
        (
            {"function": "device", "nth": 1, "probability": 0.5},
            "a fault of device needs either nth or a probability",
        ),
        ({"function": "aclrtMalloc", "nth": 0}, "counted from 1, so nth cannot be 0"),
        ({"function": "aclrtMalloc", "probability": 0.0}, "above 0 and at most 1, not 0.0"),
        ({"function": "aclrtMalloc", "probability": 1.5}, "above 0 and at most 1, not 1.5"),
        ({"function": "aclrtMalloc", "probability": float("nan")}, "above 0 and at most 1, not nan"),
        ({"function": "aclrtMalloc", "probability": 0.5, "seed": -1}, "-1 cannot be used"),
        ({"function": "aclrtMalloc", "nth": 1, "seed": 1}, "belongs to a probability"),
        ({"function": "aclrtMalloc", "nth": 1, "code": 0}, "an error code is above 0, not 0"),
        (
            {"function": "aclnnGelu", "nth": 1, "code": 1},
            "aclnnGelu comes to other bits, and returns no error code",
        ),
    ],
)
def test_a_fault_that_means_nothing(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(EmulatorError) as caught:
        Fault(**wrong)  # type: ignore[arg-type]
    assert message in str(caught.value)


def page() -> tuple[int, object]:
    """The address of a page of ordinary memory, and what keeps it."""
    room = (ctypes.c_uint8 * (2 * NBYTES))()
    return -(-ctypes.addressof(room) // NBYTES) * NBYTES, room


def register_host(acl: Acl) -> int:
    start, _room = page()
    code = acl.call("aclrtHostRegisterV2", start, NBYTES, 0)
    if code == 0:
        acl.check("aclrtHostUnregister", start)
    return code


def undo(acl: Acl, function: str, pointer: int) -> int:
    """Calls a function that frees or unregisters. Where it fails, nothing has changed and the next call works."""
    fill(pointer, 7, NBYTES)
    code = acl.call(function, pointer)
    if code != 0:
        assert acl.kind_of(pointer) == PINNED
        assert byte_at(pointer + NBYTES - 1) == 7
        acl.check(function, pointer)
    return code


def free_host(acl: Acl) -> int:
    return undo(acl, "aclrtFreeHost", acl.malloc_host(NBYTES))


def unregister_host(acl: Acl) -> int:
    start, _room = page()
    acl.check("aclrtHostRegisterV2", start, NBYTES, 0)
    return undo(acl, "aclrtHostUnregister", start)


def ask_what_it_is(acl: Acl) -> int:
    with acl.buffers(NBYTES) as (_, host):
        return acl.call("aclrtPointerGetAttributes", host, ctypes.byref(Attributes()))


def making(function: str, undo: str, *arguments: int) -> Callable[[Acl], int]:
    """Calls a function that makes something, and what undoes it."""

    def call(acl: Acl) -> int:
        made = ctypes.c_size_t()
        code = acl.call(function, ctypes.byref(made), *arguments)
        if code == 0:
            acl.check(undo, made.value)
        return code

    return call


def copying(function: str, *more: int) -> Callable[[Acl], int]:
    def call(acl: Acl) -> int:
        with acl.buffers(NBYTES) as (device, host):
            code = acl.call(function, device, NBYTES, host, NBYTES, H2D, *more)
            acl.check("aclrtSynchronizeStream", 0)
        return code

    return call


def copying_a_batch(function: str, *more: int) -> Callable[[Acl], int]:
    def call(acl: Acl) -> int:
        with acl.buffers(NBYTES) as (device, host):
            code = acl.call(function, *Batch([(device, host, 64), (device + 64, host + 64, 64)]).arguments, *more)
            acl.check("aclrtSynchronizeStream", 0)
        return code

    return call


# The function that is told to fail, what is called, and CANN's code.
CALLS = {
    "aclrtMalloc": ("aclrtMalloc", making("aclrtMalloc", "aclrtFree", NBYTES, 0), NO_MEMORY),
    "aclrtMallocAlign32": ("aclrtMalloc", making("aclrtMallocAlign32", "aclrtFree", NBYTES, 0), NO_MEMORY),
    "aclrtMallocHost": ("aclrtMallocHost", making("aclrtMallocHost", "aclrtFreeHost", NBYTES), NO_MEMORY),
    "aclrtMallocHostWithCfg": (
        "aclrtMallocHost",
        making("aclrtMallocHostWithCfg", "aclrtFreeHost", NBYTES, 0),
        NO_MEMORY,
    ),
    "aclrtFreeHost": ("aclrtFreeHost", free_host, NOT_FREED),
    "aclrtHostRegisterV2": ("aclrtHostRegister", register_host, NO_MEMORY),
    "aclrtHostUnregister": ("aclrtHostUnregister", unregister_host, DRIVER),
    "aclrtPointerGetAttributes": ("aclrtPointerGetAttributes", ask_what_it_is, DRIVER),
    "aclrtMemcpy": ("aclrtMemcpy", copying("aclrtMemcpy"), INTERNAL),
    "aclrtMemcpyAsync": ("aclrtMemcpyAsync", copying("aclrtMemcpyAsync", 0), INTERNAL),
    "aclrtMemcpyBatch": ("aclrtMemcpyBatch", copying_a_batch("aclrtMemcpyBatch"), INTERNAL),
    "aclrtMemcpyBatchAsync": ("aclrtMemcpyBatchAsync", copying_a_batch("aclrtMemcpyBatchAsync", 0), INTERNAL),
    "aclrtCreateStream": ("aclrtCreateStream", making("aclrtCreateStream", "aclrtDestroyStream"), NO_STREAM),
    "aclrtCreateStreamWithConfig": (
        "aclrtCreateStream",
        making("aclrtCreateStreamWithConfig", "aclrtDestroyStream", 0, 0),
        NO_STREAM,
    ),
    "aclrtCreateEvent": ("aclrtCreateEvent", making("aclrtCreateEvent", "aclrtDestroyEvent"), NO_EVENT),
    "aclrtCreateEventExWithFlag": (
        "aclrtCreateEvent",
        making("aclrtCreateEventExWithFlag", "aclrtDestroyEvent", 0),
        NO_EVENT,
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_the_nth_call_fails_once_with_canns_code(acl: Acl, case: str) -> None:
    function, call, code = CALLS[case]
    ascend_emulator.inject(Fault(function, nth=3))
    assert [call(acl) for _ in range(5)] == [0, 0, code, 0, 0]
    assert acl.message() == f"{function}: this call was told to fail"


def test_the_code_can_be_chosen_and_a_fault_withdrawn(acl: Acl) -> None:
    _, call, _ = CALLS["aclrtMalloc"]
    ascend_emulator.inject("aclrtMalloc:1,code=4711")
    assert [call(acl), call(acl)] == [4711, 0]
    ascend_emulator.inject("aclrtMalloc:1")
    ascend_emulator.inject("aclrtMalloc:2")  # in its place
    assert [call(acl), call(acl), call(acl)] == [0, NO_MEMORY, 0]
    ascend_emulator.inject("aclrtMalloc:1")
    ascend_emulator.clear_faults()
    assert call(acl) == 0


def test_a_probability_repeats_with_its_seed(acl: Acl) -> None:
    _, call, _ = CALLS["aclrtCreateEvent"]

    def failures(seed: int) -> list[bool]:
        ascend_emulator.inject(Fault("aclrtCreateEvent", probability=0.2, seed=seed))
        return [call(acl) != 0 for _ in range(300)]

    first = failures(7)
    assert failures(7) == first
    assert failures(8) != first
    assert 20 < sum(first) < 120


def test_host_memory_has_the_limit_that_is_set(acl: Acl) -> None:
    _, call, _ = CALLS["aclrtMallocHost"]
    ascend_emulator.configure(host_bytes=1)
    try:
        assert [call(acl), register_host(acl)] == [NO_MEMORY, NO_MEMORY]
        assert acl.message().startswith("aclrtHostRegister: needed 0.0 MiB, pinned already ")
    finally:
        ascend_emulator.configure(host_bytes=0)
    assert [call(acl), register_host(acl)] == [0, 0]


def test_a_lost_device_fails_until_it_is_brought_back(acl: Acl) -> None:
    with acl.buffers(NBYTES) as (device, host), acl.streams(1) as (stream,), acl.event() as mark:
        needing_it = (
            ("aclrtMemcpy", device, NBYTES, host, NBYTES, H2D),
            ("aclrtMemsetAsync", device, NBYTES, 0, NBYTES, stream),
            ("aclrtMemcpyAsync", device, NBYTES, host, NBYTES, H2D, stream),
            ("aclrtRecordEvent", mark, stream),
            ("aclrtStreamWaitEvent", stream, mark),
            ("aclrtSynchronizeEvent", mark),
            ("aclrtSynchronizeStream", stream),
            ("aclrtSynchronizeDevice",),
            ("aclrtStreamQuery", stream, ctypes.byref(ctypes.c_int())),
            ("aclrtQueryEventStatus", mark, ctypes.byref(ctypes.c_int())),
            ("aclrtMalloc", ctypes.byref(ctypes.c_size_t()), NBYTES, 0),
            ("aclrtMallocHost", ctypes.byref(ctypes.c_size_t()), NBYTES),
            ("aclrtCreateStream", ctypes.byref(ctypes.c_size_t())),
            ("aclrtCreateEvent", ctypes.byref(ctypes.c_size_t())),
        )
        acl.check("aclrtRecordEvent", mark, stream)
        ascend_emulator.inject("device:3")
        memset = needing_it[1]
        assert [acl.call(*memset) for _ in range(4)] == [0, 0, LOST, LOST]
        failed = {call[0]: acl.call(*call) for call in needing_it}
        assert failed == dict.fromkeys(failed, LOST)
        assert acl.message() == "the device is lost"
        ascend_emulator.clear_faults()
        acl.check("aclrtSynchronizeStream", stream)
        for call in needing_it[:-4]:
            acl.check(*call)


def test_a_device_is_lost_with_the_code_that_is_chosen(acl: Acl) -> None:
    with acl.buffers(NBYTES) as (device, _):
        ascend_emulator.inject(Fault("device", nth=1, code=507899))
        assert acl.call("aclrtMemsetAsync", device, NBYTES, 0, NBYTES, 0) == 507899
        assert acl.call("aclrtSynchronizeDevice") == 507899
        ascend_emulator.clear_faults()


def test_host_memory_can_be_let_go_of_when_the_device_is_lost(acl: Acl) -> None:
    host, (start, _room) = acl.malloc_host(NBYTES), page()
    acl.check("aclrtHostRegisterV2", start, NBYTES, 0)
    with acl.buffers(NBYTES) as (device, _):
        ascend_emulator.inject("device:1")
        assert acl.call("aclrtMemsetAsync", device, NBYTES, 0, NBYTES, 0) == LOST
        for function, pointer in (("aclrtFreeHost", host), ("aclrtHostUnregister", start)):
            assert acl.kind_of(pointer) == PINNED
            acl.check(function, pointer)
            assert acl.kind_of(pointer) != PINNED
        ascend_emulator.clear_faults()


@pytest.mark.slow(why="a process imports torch, and loses its device")
def test_what_torch_makes_of_faults(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import ctypes
        import torch
        from ascend_emulator import clear_faults, inject

        x, pinned = torch.ones(4, device="npu"), torch.ones(4).pin_memory()
        stream = torch.npu.current_stream()

        def new_block():
            return torch.empty(64 << 20, dtype=torch.uint8, device="npu")

        def attempt(what):
            try:
                what()
            except RuntimeError as error:
                told = [code for code in ("507000", "507010", "507899", "207007", "207008") if code in str(error)]
                print(what.__name__, type(error).__name__, *told)
            else:
                print(what.__name__, "went well")

        def copy():
            x.copy_(pinned, non_blocking=True)

        def add():
            x.add_(1)

        inject("aclrtMalloc:1")
        attempt(new_block)  # torch gives back what it has cached, and asks once more
        inject("aclrtMalloc:p=1")
        torch.npu.empty_cache()
        attempt(new_block)
        inject("aclrtMallocHost:1")
        print("pinned at", torch.empty(8 << 20, dtype=torch.uint8, pin_memory=True).data_ptr())
        for fault, call in (
            ("aclrtMemcpy:1", x.cpu),
            ("aclrtMemcpyAsync:1", copy),
            ("aclrtCreateStream:1", torch.npu.Stream),
            ("aclrtCreateEvent:1", torch.npu.Event().record),
        ):
            inject(fault)
            attempt(call)
            attempt(call)
        for call in (pinned.is_pinned, copy):
            inject("aclrtPointerGetAttributes:1")
            attempt(call)
        torch.npu.host_empty_cache()  # the tensor at 0 is in it
        unused = torch.empty(8 << 20, dtype=torch.uint8, pin_memory=True)
        address = unused.data_ptr()
        del unused
        inject("aclrtFreeHost:p=1")
        attempt(torch.npu.host_empty_cache)
        there = torch.frombuffer((ctypes.c_uint8 * 4).from_address(address), dtype=torch.uint8)
        print("still pinned:", there.is_pinned(), torch.npu.host_memory_stats()["allocated_bytes.current"])
        clear_faults()
        stream.synchronize()
        inject("device:1")
        for call in (add, copy, x.cpu, stream.synchronize, torch.npu.synchronize, stream.query, new_block):
            attempt(call)
        clear_faults()
        add()
        print(x.tolist())
        """,
    )
    # Without torch_npu's queue each failure is raised where it happens; with it torch_npu tells the first one at
    # the next synchronisation, and silently drops all later work.
    done = run(*EMULATOR, script, cwd=tmp_path, TASK_QUEUE_ENABLE="0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "new_block went well",
        "new_block OutOfMemoryError",
        "pinned at 0",  # torch_npu does not look whether it got the memory
        *("cpu RuntimeError 507000", "cpu went well"),
        *("copy RuntimeError 507000", "copy went well"),
        *("Stream RuntimeError 207008", "Stream went well"),
        *("record RuntimeError 207007", "record went well"),
        *("is_pinned RuntimeError 507899", "copy RuntimeError 507899"),
        *("host_empty_cache went well", "still pinned: True 16"),  # nor whether it could free it
        *(f"{name} RuntimeError 507010" for name in ("add", "copy", "cpu", "synchronize", "synchronize", "query")),
        "new_block RuntimeError 507010",
        "[2.0, 2.0, 2.0, 2.0]",
    ]


def test_an_operator_that_comes_to_other_bits() -> None:
    """The second call, in the last bit of its first element."""
    x = torch.ones(2, 3, device="npu")
    right = torch.nn.functional.gelu(x).cpu()
    ascend_emulator.inject("aclnnGeluV2:2")
    try:
        found = [torch.nn.functional.gelu(x).cpu() for _ in range(3)]
    finally:
        ascend_emulator.clear_faults()
    assert torch.equal(found[0], right)
    assert torch.equal(found[2], right)
    wrong = found[1].view(torch.int32) - right.view(torch.int32)
    assert wrong.flatten().abs().tolist() == [1, 0, 0, 0, 0, 0]

"""What goes wrong while every call says that it went well."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator

import ascend_emulator
import pytest
from ascend_emulator import EmulatorError, Fault
from ascend_emulator.faults import SILENT

from emulator.tests.acl import D2H, H2D, PAGEABLE, PINNED, Acl, byte_at, fill

NBYTES = 4096


@pytest.fixture
def acl() -> Iterator[Acl]:
    yield Acl()
    ascend_emulator.clear_faults()


def copied(acl: Acl, kind: int, value: int, stream: int) -> list[int]:
    """The first and the last byte of a copy on a stream, to where there were zeros."""
    with acl.buffers(NBYTES) as (device, host):
        if kind == H2D:
            fill(host, value, NBYTES)
            acl.copy(H2D, device, host, NBYTES, stream)
            acl.check("aclrtSynchronizeStream", stream)
            fill(host, 0, NBYTES)
            acl.check("aclrtMemcpy", host, NBYTES, device, NBYTES, D2H)
        else:
            fill(host, value, NBYTES)
            acl.check("aclrtMemcpy", device, NBYTES, host, NBYTES, H2D)
            fill(host, 0, NBYTES)
            acl.copy(D2H, host, device, NBYTES, stream)
            acl.check("aclrtSynchronizeStream", stream)
        return [byte_at(host), byte_at(host + NBYTES - 1)]


@pytest.mark.parametrize(("name", "kind"), [("copy_h2d", H2D), ("copy_d2h", D2H)])
def test_the_nth_copy_of_a_direction_brings_other_bits(acl: Acl, name: str, kind: int) -> None:
    ascend_emulator.inject(f"{name}:2")
    with acl.streams(1) as (stream,):
        assert [copied(acl, each, 6, stream) for each in (kind, H2D + D2H - kind, kind, kind)] == [
            [6, 6],
            [6, 6],
            [7, 6],
            [6, 6],
        ]


@pytest.mark.parametrize(("name", "kind"), [("late_h2d", H2D), ("late_d2h", D2H)])
def test_a_stream_goes_on_before_a_late_copy_has_landed(acl: Acl, name: str, kind: int) -> None:
    ascend_emulator.inject(f"{name}:1")
    with acl.buffers(NBYTES) as (device, host), acl.streams(1) as (stream,), acl.event() as mark:
        fill(host, 6, NBYTES)
        acl.check("aclrtMemset", device, NBYTES, 5, NBYTES)
        if kind == H2D:
            acl.copy(H2D, device, host, NBYTES, stream)
            acl.check("aclrtMemsetAsync", device, NBYTES, 7, NBYTES, stream)  # and so the copy overtakes it
        else:
            acl.copy(D2H, host, device, NBYTES, stream)
        acl.check("aclrtRecordEvent", mark, stream)
        status = ctypes.c_int(0)
        while status.value != 1:
            acl.check("aclrtQueryEventStatus", mark, ctypes.byref(status))
        if kind == D2H:
            assert byte_at(host) == 6  # not yet
        acl.check("aclrtSynchronizeEvent", mark)
        if kind == D2H:
            assert byte_at(host) == 5
        else:
            fill(host, 0, NBYTES)
            acl.check("aclrtMemcpy", host, NBYTES, device, NBYTES, D2H)
            assert byte_at(host) == 6


@pytest.mark.parametrize(("name", "kind"), [("blocking_h2d", H2D), ("blocking_d2h", D2H)])
def test_the_call_of_a_blocking_copy_returns_when_the_copy_is_done(acl: Acl, name: str, kind: int) -> None:
    with acl.buffers(NBYTES) as (device, host), acl.streams(1) as (stream,):
        fill(host, 0, NBYTES)
        acl.check("aclrtMemset", device, NBYTES, 5, NBYTES)
        to, of = (device, host) if kind == H2D else (host, device)
        ascend_emulator.inject(f"{name}:1")
        acl.copy(kind, to, of, NBYTES, stream)
        status = ctypes.c_int(7)
        acl.check("aclrtStreamQuery", stream, ctypes.byref(status))
        assert status.value == 0, "the stream still had work"


@pytest.mark.schedules("eager", why="in the others the host may be waiting already while it issues, or asks")
@pytest.mark.parametrize(("name", "kind"), [("endless_h2d", H2D), ("endless_d2h", D2H)])
def test_an_endless_copy_ends_with_the_fault(acl: Acl, name: str, kind: int) -> None:
    with acl.buffers(NBYTES) as (device, host), acl.streams(1) as (stream,):
        to, of = (device, host) if kind == H2D else (host, device)
        ascend_emulator.inject(f"{name}:1")
        acl.copy(kind, to, of, NBYTES, stream)
        ended = threading.Event()

        def wait() -> None:
            acl.check("aclrtSynchronizeStream", stream)
            ended.set()

        waiter = threading.Thread(target=wait)
        waiter.start()
        assert not ended.wait(0.2)
        ascend_emulator.clear_faults()
        waiter.join(60)
        assert ended.is_set()


@pytest.mark.schedules("eager", why="as above")
def test_a_lost_wait_lets_its_stream_go_on(acl: Acl) -> None:
    with acl.buffers(NBYTES) as (device, host), acl.streams(2) as (first, second), acl.event() as mark:
        ascend_emulator.inject("endless_h2d:1")
        acl.copy(H2D, device, host, NBYTES, first)
        acl.check("aclrtRecordEvent", mark, first)
        ascend_emulator.inject("lost_wait:1")
        acl.check("aclrtStreamWaitEvent", second, mark)
        acl.check("aclrtSynchronizeStream", second)  # or it would not return
        ascend_emulator.clear_faults()
        acl.check("aclrtSynchronizeStream", first)


def test_pinned_memory_that_the_runtime_does_not_know(acl: Acl) -> None:
    host = acl.malloc_host(NBYTES)
    ascend_emulator.inject("unpinned:2")
    assert [acl.kind_of(host) for _ in range(3)] == [PINNED, PAGEABLE, PINNED]
    acl.check("aclrtFreeHost", host)


@pytest.mark.parametrize("name", SILENT)
def test_it_returns_no_code(name: str) -> None:
    assert str(Fault.parse(f"{name}:p=0.5,seed=3")) == f"{name}:p=0.5,seed=3"
    with pytest.raises(EmulatorError, match=f"{name} goes wrong in silence, and returns no error code"):
        Fault(name, nth=1, code=5)

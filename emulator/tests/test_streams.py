"""Streams and events: what runs before what, and what the host is told."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from emulator.tests.acl import D2H, H2D, Acl, byte_at, fill
from emulator.tests.launch import EMULATOR, run, write_script

MB = 1_000_000
SLOW = "20MB/s"
NO_STREAM, NO_TIME = 107003, 107006


def reached(acl: Acl, event: int) -> bool:
    status = ctypes.c_int(-1)
    acl.check("aclrtQueryEventStatus", event, ctypes.byref(status))
    assert status.value in (0, 1)
    return status.value == 1


def idle(acl: Acl, stream: int) -> bool:
    status = ctypes.c_int(-1)
    acl.check("aclrtStreamQuery", stream, ctypes.byref(status))
    assert status.value in (0, 1)
    return status.value == 0


def test_a_stream_keeps_the_order(device: str) -> None:
    stream = torch.npu.Stream()
    with torch.npu.stream(stream):
        value = torch.ones(1 << 16, device=device)
        for _ in range(100):
            value.mul_(1.5).sub_(0.25)
    stream.synchronize()
    expected = 1.0
    for _ in range(100):
        expected = expected * 1.5 - 0.25
    torch.testing.assert_close(value.cpu(), torch.full((1 << 16,), expected))


def test_a_wait_orders_two_streams(device: str, link: Callable[[str], None]) -> None:
    link(SLOW)
    source = torch.full((MB,), 3.0).pin_memory()
    target = torch.zeros(MB, device=device)
    first, second = torch.npu.Stream(), torch.npu.Stream()
    first.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(first):
        target.copy_(source, non_blocking=True)
        landed = first.record_event()
    second.wait_event(landed)
    with torch.npu.stream(second):
        total = (target * 2).sum()
    second.synchronize()
    assert total.item() == MB * 6


@pytest.mark.schedules("eager", "late", why="its copies run when they like")
def test_without_a_wait_streams_overtake_each_other(acl: Acl, link: Callable[[str], None]) -> None:
    link(SLOW)
    with acl.buffers(8 * MB) as (device, host), acl.streams(2) as (slow, other), acl.event() as mark:
        acl.copy(H2D, device, host, 8 * MB, slow)
        acl.check("aclrtRecordEvent", mark, other)
        acl.check("aclrtSynchronizeEvent", mark)
        assert not idle(acl, slow)


@pytest.mark.schedules("eager", "late", why="its copies run when they like")
def test_queries_tell_whether_the_work_is_done(acl: Acl, link: Callable[[str], None]) -> None:
    link(SLOW)
    with acl.buffers(8 * MB) as (device, host), acl.streams(1) as (stream,), acl.event() as mark:
        assert idle(acl, stream)
        assert reached(acl, mark)  # never recorded
        acl.copy(H2D, device, host, 8 * MB, stream)
        acl.check("aclrtRecordEvent", mark, stream)
        assert not reached(acl, mark)
        assert not idle(acl, stream)
        acl.check("aclrtSynchronizeEvent", mark)
        assert reached(acl, mark)
        acl.check("aclrtSynchronizeStream", stream)
        assert idle(acl, stream)


@pytest.mark.schedules("eager", "late", why="its copies run when they like")
def test_an_event_stands_for_its_newest_record(acl: Acl, link: Callable[[str], None]) -> None:
    link(SLOW)
    with acl.buffers(8 * MB) as (device, host), acl.streams(1) as (stream,), acl.event() as mark:
        acl.check("aclrtRecordEvent", mark, stream)
        acl.check("aclrtSynchronizeEvent", mark)
        acl.check("aclrtMemsetAsync", device, 8 * MB, 5, 8 * MB, stream)
        acl.copy(D2H, host, device, 8 * MB, stream)
        acl.check("aclrtRecordEvent", mark, stream)
        assert not reached(acl, mark)
        acl.check("aclrtSynchronizeEvent", mark)
        assert byte_at(host + 8 * MB - 1) == 5


def test_a_wait_is_for_the_record_that_was_newest_then(acl: Acl, link: Callable[[str], None]) -> None:
    link(SLOW)
    with acl.buffers(8 * MB) as (device, host), acl.streams(3) as (slow, quick, waiting), acl.event() as mark:
        acl.check("aclrtMemsetAsync", device, 8 * MB, 5, 8 * MB, slow)
        acl.copy(D2H, host, device, 8 * MB, slow)
        acl.check("aclrtRecordEvent", mark, slow)
        acl.check("aclrtStreamWaitEvent", waiting, mark)
        acl.check("aclrtRecordEvent", mark, quick)  # reached at once, but nobody waits for this one
        acl.check("aclrtSynchronizeStream", waiting)
        assert byte_at(host + 8 * MB - 1) == 5


def test_an_event_may_be_destroyed_while_it_is_in_use(acl: Acl, link: Callable[[str], None]) -> None:
    link(SLOW)
    with acl.buffers(8 * MB) as (device, host), acl.streams(2) as (slow, waiting):
        acl.check("aclrtMemsetAsync", device, 8 * MB, 5, 8 * MB, slow)
        acl.copy(D2H, host, device, 8 * MB, slow)
        with acl.event() as mark:
            acl.check("aclrtRecordEvent", mark, slow)
            acl.check("aclrtStreamWaitEvent", waiting, mark)
        acl.check("aclrtSynchronizeStream", waiting)
        assert byte_at(host + 8 * MB - 1) == 5


def test_elapsed_time(device: str, link: Callable[[str], None]) -> None:
    link(SLOW)
    source = torch.zeros(8 * MB, dtype=torch.uint8).pin_memory()
    target = torch.zeros(8 * MB, dtype=torch.uint8, device=device)
    start, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    start.record()
    target.copy_(source, non_blocking=True)
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) >= 400
    assert end.elapsed_time(start) == -start.elapsed_time(end)


def test_no_elapsed_time_before_both_events_are_reached(acl: Acl) -> None:
    milliseconds = ctypes.c_float()
    with acl.event() as first, acl.event() as second:
        acl.check("aclrtRecordEvent", first, 0)
        acl.check("aclrtSynchronizeEvent", first)
        assert acl.call("aclrtEventElapsedTime", ctypes.byref(milliseconds), first, second) == NO_TIME
        assert "not been reached" in acl.message()


def test_many_streams_at_once(acl: Acl) -> None:
    count, nbytes = 64, 1 << 20
    with acl.buffers(count * nbytes) as (device, host), acl.streams(count) as streams:
        assert len(set(streams)) == count
        for index, stream in enumerate(streams):
            offset = index * nbytes
            acl.check("aclrtMemsetAsync", device + offset, nbytes, index + 1, nbytes, stream)
            acl.copy(D2H, host + offset, device + offset, nbytes, stream)
        acl.check("aclrtSynchronizeDevice")
        copied = ctypes.string_at(host, count * nbytes)
    assert copied == b"".join(bytes([index + 1]) * nbytes for index in range(count))


def test_a_destroyed_stream_has_done_its_work_and_is_refused(acl: Acl, link: Callable[[str], None]) -> None:
    link(SLOW)
    with acl.buffers(4 * MB) as (device, host):
        stream = acl.made("aclrtCreateStream")
        acl.check("aclrtMemsetAsync", device, 4 * MB, 5, 4 * MB, stream)
        acl.copy(D2H, host, device, 4 * MB, stream)
        acl.check("aclrtDestroyStream", stream)
        assert byte_at(host + 4 * MB - 1) == 5
        for function in ("aclrtDestroyStream", "aclrtSynchronizeStream"):
            assert acl.call(function, stream) == NO_STREAM
        assert acl.call("aclrtMemsetAsync", device, 1, 1, 1, stream) == NO_STREAM


def test_streams_come_and_go_while_others_synchronise(acl: Acl) -> None:
    stop = threading.Event()
    codes: set[int] = set()

    def synchronise() -> None:
        while not stop.is_set():
            codes.add(acl.call("aclrtSynchronizeDevice"))

    threads = [threading.Thread(target=synchronise) for _ in range(3)]
    for thread in threads:
        thread.start()
    with acl.buffers(4096) as (device, _):
        for _ in range(300):
            with acl.streams(2) as streams:
                for index, stream in enumerate(streams):
                    acl.check("aclrtMemsetAsync", device + 2048 * index, 2048, 1, 2048, stream)
    stop.set()
    for thread in threads:
        thread.join()
    assert codes == {0}


def test_synchronise_waits_for_what_is_queued_and_no_longer(acl: Acl, link: Callable[[str], None]) -> None:
    link(SLOW)
    with acl.buffers(MB // 2) as (device, host), acl.streams(1) as (stream,):
        fill(host, 5, MB // 2)
        acl.copy(H2D, device, host, MB // 2, stream)
        waiter = threading.Thread(target=acl.check, args=("aclrtSynchronizeStream", stream))
        waiter.start()
        # Two copies are queued before one is waited for, so the stream is never idle.
        with acl.event() as odd, acl.event() as even:
            marks = [odd, even] * 50
            for index, mark in enumerate(marks):
                acl.copy(H2D, device, host, MB // 2, stream)
                acl.check("aclrtRecordEvent", mark, stream)
                if index > 0:
                    acl.check("aclrtSynchronizeEvent", marks[index - 1])
                if not waiter.is_alive():
                    break
            assert not waiter.is_alive()
        waiter.join()


@pytest.mark.slow(why="a process imports torch")
def test_an_exception_in_a_kernel_is_told_at_synchronise_with_the_operators_name(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import torch
        table = torch.ones(3, 4, device="npu")
        torch.nn.functional.embedding(torch.tensor([7], device="npu"), table)
        for attempt in range(2):
            try:
                torch.npu.synchronize()
            except RuntimeError as error:
                print(*[line for line in str(error).splitlines() if "aclnn" in line or "frame" in line], sep="|")
        """,
    )
    done = run(*EMULATOR, script, cwd=tmp_path)
    assert done.stdout == "aclnnEmbedding failed on the device: index out of range in self\n" * 2, done.stderr


@pytest.mark.slow(why="a process imports torch")
def test_a_process_may_end_with_work_queued(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import torch
        source = torch.zeros(4 << 20, dtype=torch.uint8).pin_memory()
        target = torch.zeros(4 << 20, dtype=torch.uint8, device="npu")
        matrix = torch.ones(512, 512, device="npu")
        with torch.npu.stream(torch.npu.Stream()):
            target.copy_(source, non_blocking=True)
        for _ in range(20):
            matrix = matrix @ matrix
        print("queued")
        """,
    )
    done = run(*EMULATOR, "--h2d", "20MB/s", script, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "queued\n"), done.stderr

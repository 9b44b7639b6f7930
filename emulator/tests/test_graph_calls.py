"""CANN's functions on graphs: what they refuse, with which code, and what becomes of the capture."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator

import pytest

from emulator.tests.acl import D2D, D2H, H2D, Acl, byte_at, fill

NONE, ACTIVE, INVALID = 0, 1, 2  # aclmdlRICaptureStatus
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2  # aclmdlRICaptureMode
PARAMETER, NO_STREAM, DEPENDENCY, UNJOINED, CAPTURED, EVENT_CAPTURED = (
    107000,
    107003,
    107024,
    107025,
    107027,
    107028,
)
NOT_CAPTURED, FORBIDDEN, DEFAULT_STREAM, CONFLICT, UNMATCHED, WRONG_THREAD = (
    *(107029, 107030, 107031, 107032, 107036, 107038),
)
INVALIDATED = 507903
NBYTES = 64


@pytest.fixture
def streams(acl: Acl) -> Iterator[list[int]]:
    with acl.streams(3) as made:
        yield made


def begin(acl: Acl, stream: int, mode: int = GLOBAL) -> None:
    acl.check("aclmdlRICaptureBegin", stream, mode)


def end(acl: Acl, stream: int) -> int:
    """Returns the graph."""
    graph = ctypes.c_size_t()
    acl.check("aclmdlRICaptureEnd", stream, ctypes.byref(graph))
    return graph.value


def end_in_vain(acl: Acl, stream: int) -> int:
    """Returns the ACL code."""
    graph = ctypes.c_size_t(1)
    code = acl.call("aclmdlRICaptureEnd", stream, ctypes.byref(graph))
    assert graph.value == 0
    return code


def status(acl: Acl, stream: int) -> tuple[int, int]:
    """Of the capture, and the graph."""
    state, graph = ctypes.c_int(-1), ctypes.c_size_t()
    acl.check("aclmdlRICaptureGetInfo", stream, ctypes.byref(state), ctypes.byref(graph))
    return state.value, graph.value


def number(acl: Acl, graph: int) -> int:
    value = ctypes.c_uint32()
    acl.check("aclmdlRIGetId", graph, ctypes.byref(value))
    return value.value


def fill_on(acl: Acl, stream: int, device: int, value: int) -> int:
    """Returns the ACL code."""
    return acl.call("aclrtMemsetAsync", device, NBYTES, value, NBYTES, stream)


def elsewhere(acl: Acl, function: str, *arguments: object) -> int:
    """The ACL code of a call on another thread."""
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(acl.call(function, *arguments)))
    thread.start()
    thread.join()
    return codes[0]


def test_a_graph_has_a_number_from_its_begin_until_it_is_destroyed(acl: Acl, streams: list[int]) -> None:
    assert status(acl, streams[0]) == (NONE, 0)
    begin(acl, streams[0])
    state, graph = status(acl, streams[0])
    assert (state, status(acl, streams[1])) == (ACTIVE, (NONE, 0))
    first = number(acl, graph)
    assert acl.call("aclmdlRIExecuteAsync", graph, streams[1]) == PARAMETER
    assert end(acl, streams[0]) == graph
    assert number(acl, graph) == first
    begin(acl, streams[0])
    other = end(acl, streams[0])
    assert number(acl, other) > first
    for each in (graph, other):
        acl.check("aclmdlRIDestroy", each)
        assert acl.call("aclmdlRIDestroy", each) == PARAMETER
    assert acl.call("aclmdlRIExecuteAsync", graph, streams[0]) == PARAMETER


def test_streams_that_wait_for_a_captured_event_are_captured_until_the_end(acl: Acl, streams: list[int]) -> None:
    main, side, other = streams
    with acl.buffers(NBYTES) as (device, _), acl.event() as there, acl.event() as back:
        begin(acl, main)
        acl.check("aclrtRecordEvent", there, main)
        acl.check("aclrtStreamWaitEvent", side, there)
        assert status(acl, side) == status(acl, main) != (NONE, 0)
        assert status(acl, other) == (NONE, 0)
        assert fill_on(acl, side, device, 5) == 0
        acl.check("aclrtRecordEvent", back, side)
        acl.check("aclrtStreamWaitEvent", main, back)
        assert end_in_vain(acl, side) == UNMATCHED
        graph = end(acl, main)
        assert (status(acl, main), status(acl, side)) == ((NONE, 0), (NONE, 0))
        acl.check("aclrtSynchronizeDevice")
        assert byte_at(device) != 5
        acl.check("aclmdlRIExecuteAsync", graph, other)
        acl.check("aclrtSynchronizeStream", other)
        assert byte_at(device) == 5
        acl.check("aclmdlRIDestroy", graph)


def test_a_capture_begins_once_and_not_on_the_default_stream(acl: Acl, streams: list[int]) -> None:
    assert acl.call("aclmdlRICaptureBegin", 0, GLOBAL) == PARAMETER
    assert acl.call("aclmdlRICaptureBegin", 1, GLOBAL) == NO_STREAM
    assert end_in_vain(acl, streams[0]) == NOT_CAPTURED
    begin(acl, streams[0])
    assert acl.call("aclmdlRICaptureBegin", streams[0], GLOBAL) == CAPTURED
    acl.check("aclmdlRIDestroy", end(acl, streams[0]))


def test_what_would_wait_for_a_captured_stream_is_refused(acl: Acl, streams: list[int]) -> None:
    result, milliseconds = ctypes.c_int(), ctypes.c_float()
    with acl.event() as event:
        begin(acl, streams[0])
        acl.check("aclrtRecordEvent", event, streams[0])
        calls: dict[str, tuple[tuple[object, ...], int]] = {
            "aclrtSynchronizeStream": ((streams[0],), CAPTURED),
            "aclrtSynchronizeStreamWithTimeout": ((streams[0], 100), CAPTURED),
            "aclrtSynchronizeDevice": ((), CAPTURED),
            "aclrtStreamQuery": ((streams[0], ctypes.byref(result)), CAPTURED),
            "aclrtDestroyStream": ((streams[0],), CAPTURED),
            "aclrtSynchronizeEvent": ((event,), EVENT_CAPTURED),
            "aclrtQueryEventStatus": ((event, ctypes.byref(result)), EVENT_CAPTURED),
            "aclrtEventElapsedTime": ((ctypes.byref(milliseconds), event, event), EVENT_CAPTURED),
        }
        codes = {name: acl.call(name, *arguments) for name, (arguments, _) in calls.items()}
        assert codes == {name: code for name, (_, code) in calls.items()}
        acl.check("aclrtSynchronizeStream", streams[1])
        acl.check("aclmdlRIDestroy", end(acl, streams[0]))
        acl.check("aclrtSynchronizeDevice")
        acl.check("aclrtSynchronizeEvent", event)


def test_events_of_outside_a_capture_and_of_another_are_refused(acl: Acl, streams: list[int]) -> None:
    main, side, other = streams
    with acl.event() as outside, acl.event() as event, acl.event() as never:
        acl.check("aclrtRecordEvent", outside, other)
        begin(acl, main)
        acl.check("aclrtStreamWaitEvent", main, never)
        assert acl.call("aclrtStreamWaitEvent", main, outside) == DEPENDENCY
        acl.check("aclrtRecordEvent", event, main)
        assert acl.call("aclrtStreamWaitEvent", 0, event) == DEFAULT_STREAM
        begin(acl, side)
        assert acl.call("aclrtStreamWaitEvent", side, event) == CONFLICT
        assert (status(acl, main)[0], status(acl, side)[0]) == (INVALID, INVALID)
        assert [end_in_vain(acl, stream) for stream in (main, side)] == [INVALIDATED, INVALIDATED]
        assert [status(acl, stream)[0] for stream in (main, side)] == [NONE, NONE]


def test_a_stream_must_have_come_back_with_all_that_it_has(acl: Acl, streams: list[int]) -> None:
    main, side, _ = streams
    with acl.buffers(NBYTES) as (device, _), acl.event() as there, acl.event() as back:
        begin(acl, main)
        acl.check("aclrtRecordEvent", there, main)
        acl.check("aclrtStreamWaitEvent", side, there)
        acl.check("aclrtRecordEvent", back, side)
        acl.check("aclrtStreamWaitEvent", main, back)
        assert fill_on(acl, side, device, 5) == 0
        assert end_in_vain(acl, main) == UNJOINED
        assert "was not joined" in acl.message()
        assert fill_on(acl, side, device, 6) == 0
        acl.check("aclrtSynchronizeDevice")
        assert byte_at(device) == 6


def test_a_record_behind_the_last_work_leaves_nothing_to_join(acl: Acl, streams: list[int]) -> None:
    main, side, _ = streams
    with acl.buffers(NBYTES) as (device, _), acl.event() as there, acl.event() as back, acl.event() as late:
        begin(acl, main)
        acl.check("aclrtRecordEvent", there, main)
        acl.check("aclrtStreamWaitEvent", side, there)
        assert fill_on(acl, side, device, 5) == 0
        acl.check("aclrtRecordEvent", back, side)
        acl.check("aclrtStreamWaitEvent", main, back)
        acl.check("aclrtRecordEvent", late, side)
        graph = end(acl, main)
        acl.check("aclmdlRIExecuteAsync", graph, main)
        acl.check("aclrtSynchronizeStream", main)
        assert byte_at(device) == 5
        acl.check("aclmdlRIDestroy", graph)


def test_a_graph_takes_copies_of_pinned_memory_only(acl: Acl, streams: list[int]) -> None:
    pageable = ctypes.create_string_buffer(NBYTES)
    with acl.buffers(NBYTES) as (device, host):
        begin(acl, streams[0], RELAXED)
        there, back = (device, ctypes.addressof(pageable)), (ctypes.addressof(pageable), device)
        for kind, (destination, source) in ((H2D, there), (D2H, back)):
            arguments = (destination, NBYTES, source, NBYTES, kind, streams[0])
            assert acl.call("aclrtMemcpyAsync", *arguments) == PARAMETER
            assert "no copy of pageable memory" in acl.message()
        acl.copy(H2D, device, host, NBYTES, streams[0])
        acl.copy(D2D, device + 8, device, 8, streams[0])
        graph = end(acl, streams[0])
        fill(host, 9, NBYTES)
        acl.check("aclmdlRIExecuteAsync", graph, streams[1])
        acl.check("aclrtSynchronizeStream", streams[1])
        assert byte_at(device) == byte_at(device + NBYTES - 1) == 9
        acl.check("aclmdlRIDestroy", graph)


@pytest.mark.parametrize(
    ("mode", "of_the_thread", "here", "there"),
    [
        (GLOBAL, GLOBAL, FORBIDDEN, FORBIDDEN),
        (THREAD_LOCAL, GLOBAL, FORBIDDEN, 0),
        (RELAXED, GLOBAL, 0, 0),
        (GLOBAL, THREAD_LOCAL, FORBIDDEN, FORBIDDEN),
        (GLOBAL, RELAXED, 0, FORBIDDEN),
    ],
)
def test_the_mode_says_who_may_copy_and_fill_meanwhile(
    acl: Acl, streams: list[int], mode: int, of_the_thread: int, here: int, there: int
) -> None:
    """of_the_thread: what this thread has by aclmdlRICaptureThreadExchangeMode; the other one sets nothing."""
    with acl.buffers(NBYTES) as (device, host):
        begin(acl, streams[0], mode)
        exchanged = ctypes.c_int(of_the_thread)
        acl.check("aclmdlRICaptureThreadExchangeMode", ctypes.byref(exchanged))
        assert exchanged.value == GLOBAL
        for call in (
            ("aclrtMemcpy", device, NBYTES, host, NBYTES, H2D),
            ("aclrtMemset", device, NBYTES, 0, NBYTES),
        ):
            assert (acl.call(*call), elsewhere(acl, *call)) == (here, there)
        acl.check("aclmdlRICaptureThreadExchangeMode", ctypes.byref(exchanged))
        assert exchanged.value == of_the_thread
        acl.check("aclmdlRIDestroy", end(acl, streams[0]))
        acl.check("aclrtMemset", device, NBYTES, 0, NBYTES)


def test_a_capture_ends_on_its_thread_unless_it_is_relaxed(acl: Acl, streams: list[int]) -> None:
    for mode, expected in ((GLOBAL, WRONG_THREAD), (THREAD_LOCAL, WRONG_THREAD), (RELAXED, 0)):
        begin(acl, streams[0], mode)
        graph = ctypes.c_size_t()
        assert elsewhere(acl, "aclmdlRICaptureEnd", streams[0], ctypes.byref(graph)) == expected
        assert (graph.value != 0) == (expected == 0)
        assert status(acl, streams[0])[0] == NONE
    acl.check("aclmdlRIDestroy", graph.value)


def test_a_replay_that_touches_freed_memory_is_refused(acl: Acl, streams: list[int]) -> None:
    device = acl.malloc(NBYTES)
    begin(acl, streams[0])
    assert fill_on(acl, streams[0], device, 1) == 0
    graph = end(acl, streams[0])
    acl.check("aclrtFree", device)
    assert acl.call("aclmdlRIExecuteAsync", graph, streams[0]) == PARAMETER
    assert acl.message() == "memset: memory that was freed"
    acl.check("aclmdlRIDestroy", graph)

"""The timeline: what ran when, and the trace that shows it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import time
from pathlib import Path

import ascend_emulator
import pytest
from ascend_emulator import Span

from emulator.tests.acl import D2D, D2H, H2D, Acl
from emulator.tests.launch import EMULATOR, run, write_script

NBYTES = 1 << 16


def stream_number(acl: Acl, stream: int) -> int:
    number = ctypes.c_int32()
    acl.check("aclrtStreamGetId", stream, ctypes.byref(number))
    return number.value


def test_every_operation_has_a_span(acl: Acl) -> None:
    with acl.buffers(NBYTES) as (device, host), acl.streams(2) as (first, second):
        before = time.perf_counter()
        with ascend_emulator.record_timeline() as spans:
            acl.copy(H2D, device, host, NBYTES, first)
            acl.copy(D2H, host, device, NBYTES // 2, first)
            acl.check("aclrtMemsetAsync", device, NBYTES, 0, 100, first)
            acl.copy(D2D, device, device + 4096, 4096, first)
            acl.check("aclrtSynchronizeStream", first)
            acl.check("aclrtMemsetAsync", device, NBYTES, 0, 1, second)
            acl.check("aclrtSynchronizeStream", second)
            assert spans == []
        after = time.perf_counter()
        numbers = [stream_number(acl, stream) for stream in (first, second)]
    assert [(span.name, span.device, span.stream, span.nbytes) for span in spans] == [
        ("copy_h2d", 0, numbers[0], NBYTES),
        ("copy_d2h", 0, numbers[0], NBYTES // 2),
        ("memset", 0, numbers[0], 100),
        ("copy_d2d", 0, numbers[0], 4096),
        ("memset", 0, numbers[1], 1),
    ]
    times = [before, *(moment for span in spans for moment in (span.start, span.end)), after]
    assert times == sorted(times)


def test_now_is_on_the_clock_of_the_spans() -> None:
    times = [time.perf_counter(), ascend_emulator.now(), time.perf_counter()]
    assert times == sorted(times)


def test_a_copy_of_pageable_memory_has_its_bytes(acl: Acl) -> None:
    pageable = (ctypes.c_uint8 * NBYTES)()
    with acl.buffers(NBYTES) as (device, _), ascend_emulator.record_timeline() as spans:
        acl.copy(H2D, device, ctypes.addressof(pageable), NBYTES, 0)
        acl.copy(D2H, ctypes.addressof(pageable), device, NBYTES // 2, 0)
    assert [(span.name, span.nbytes) for span in spans] == [("copy_h2d", NBYTES), ("copy_d2h", NBYTES // 2)]


def test_recordings_can_be_nested_and_keep_nothing_afterwards(acl: Acl) -> None:
    def memset(nbytes: int) -> None:
        acl.check("aclrtMemsetAsync", device, NBYTES, 0, nbytes, 0)
        acl.check("aclrtSynchronizeStream", 0)

    with acl.buffers(NBYTES) as (device, _):
        memset(1)
        with ascend_emulator.record_timeline() as outer:
            memset(2)
            with ascend_emulator.record_timeline() as inner:
                memset(3)
            memset(4)
        memset(5)
        with contextlib.suppress(KeyError), ascend_emulator.record_timeline() as failed:
            memset(6)
            raise KeyError
    assert [span.nbytes for span in outer] == [2, 3, 4]
    assert [span.nbytes for span in inner] == [3]
    assert [span.nbytes for span in failed] == [6]
    assert ascend_emulator.timeline() == []


def test_a_trace_has_what_perfetto_needs(tmp_path: Path) -> None:
    spans = [
        Span("aclnnAdd", device=1, stream=7, nbytes=4096, start=12.5, end=12.5000015),
        Span("copy_h2d", device=0, stream=2, nbytes=8, start=12.25, end=13.0),
        Span("aclnnMul", device=1, stream=7, nbytes=0, start=13.0, end=14.0),
    ]
    ascend_emulator.write_trace(tmp_path / "trace.json", spans)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event for event in events if event["ph"] == "M"] == [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "npu:0"}},
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "npu:1"}},
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 2, "args": {"name": "stream 2"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 7, "args": {"name": "stream 7"}},
    ]
    assert events[4] == {
        "ph": "X",
        "name": "aclnnAdd",
        "pid": 1,
        "tid": 7,
        "ts": 12_500_000.0,
        "dur": 1.5,
        "args": {"bytes": 4096},
    }
    assert [event["ph"] for event in events[4:]] == ["X"] * 3
    ascend_emulator.write_trace(tmp_path / "empty.json", [])
    assert json.loads((tmp_path / "empty.json").read_text()) == {"traceEvents": []}


@pytest.mark.slow(why="a process imports torch")
def test_a_slow_copy_overlaps_with_matrix_products(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import os
        import torch

        block = torch.empty(40_000_000, dtype=torch.uint8, device="npu")
        host = torch.empty(40_000_000, dtype=torch.uint8).pin_memory()
        factor = torch.rand(64, 64, device="npu")
        torch.npu.synchronize()
        copying = torch.npu.Stream()
        with torch.npu.stream(copying):
            block.copy_(host, non_blocking=True)
        while not copying.query():
            factor @ factor
            torch.npu.current_stream().synchronize()
        os.chdir("/")  # the trace goes to where it was said to go when the script started
        """,
    )
    done = run(*EMULATOR, "--h2d", "40MB/s", "--timeline", "trace.json", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    (copy,) = (span for span in spans if span["name"] == "copy_h2d" and span["args"]["bytes"] == 40_000_000)
    products = [span for span in spans if span["name"] == "aclnnMatmul"]
    end = copy["ts"] + copy["dur"]
    beside = [span for span in products if copy["ts"] < span["ts"] and span["ts"] + span["dur"] < end]
    assert len(beside) > 10
    assert {(span["tid"] == copy["tid"], span["args"]["bytes"]) for span in beside} == {(False, 64 * 64 * 4)}
    assert copy["dur"] >= 1_000_000  # microseconds


def test_a_trace_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    script = write_script(tmp_path, "import os; os.rmdir('inner')")
    done = run(*EMULATOR, "--timeline", "inner/trace.json", script, cwd=tmp_path)
    assert done.stderr.startswith("ascend_emulator: the timeline cannot be written: ")
    assert done.stderr.count("\n") == 1

"""What ran on the device, and when."""

import ctypes
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ascend_emulator.runtime import runtime, text_from


class Span(NamedTuple):
    """One copy, fill or kernel, or with a clock one operation of a modelled drive.

    name: "copy_h2d", "copy_d2h", "copy_d2d", "memset", or the kernel's, such as "aclnnMatmul"; with the race
        detector on also "free", where torch's allocator takes memory back. "drive_read" and "drive_write" are
        those of drives.
    device, stream: numbers; streams are counted from 1 over all devices. The first drive is device -1, the next
        one -2, with stream 0.
    nbytes: bytes written; of a drive those that were read or written.
    start, end: seconds on the clock of now().
    """

    name: str
    device: int
    stream: int
    nbytes: int
    start: float
    end: float


def now() -> float:
    """Seconds: with a clock those of the modelled host, from 0 on; else those of time.perf_counter().

    Raises EmulatorError without a device.
    """
    library = runtime()
    if not library.ascend_emulator_models_time():
        return time.perf_counter()
    tell = library.ascend_emulator_now
    tell.restype = ctypes.c_int64
    return float(tell() / 1e9)


def timeline() -> list[Span]:
    """What has ended while the timeline was kept, in the order in which it ended.

    It is kept within record_timeline(), and from start(timeline=...) on. Raises EmulatorError without a device.
    """
    rows = json.loads(text_from("ascend_emulator_timeline"))
    return [
        Span(name, device, stream, nbytes, start_ns / 1e9, end_ns / 1e9)
        for name, device, stream, nbytes, start_ns, end_ns in rows
    ]


@contextmanager
def record_timeline() -> Iterator[list[Span]]:
    """Yields a list that has, after the block, what began and ended in it.

    It does not wait: synchronise before the block ends, or what is still queued is missing. Raises EmulatorError
    where the process has no emulated device.
    """
    library = runtime()
    spans: list[Span] = []
    start = now()
    was_kept = library.ascend_emulator_keep_timeline(1)
    try:
        yield spans
    finally:
        spans.extend(span for span in timeline() if span.start >= start)
        if not was_kept:
            library.ascend_emulator_keep_timeline(0)
            library.ascend_emulator_clear_timeline()


def write_trace(path: str | Path, spans: Sequence[Span] | None = None) -> None:
    """Writes a trace for Perfetto or chrome://tracing: a process for each device, a thread for each stream.

    A drive is a process too.

    spans: those of timeline() unless given. Raises OSError where the file cannot be written.
    """
    shown = timeline() if spans is None else spans
    streams = sorted({(span.device, span.stream) for span in shown})
    devices = sorted({device for device, _ in streams})
    titles = {device: f"npu:{device}" if device >= 0 else _drive(device) for device in devices}
    names = [_name("process", titles[device], pid=_pid(device)) for device in devices]
    names += [_name("thread", f"stream {stream}", pid=_pid(device), tid=stream) for device, stream in streams]
    events = [
        {
            "ph": "X",
            "name": span.name,
            "pid": _pid(span.device),
            "tid": span.stream,
            "ts": round(span.start * 1e6, 3),
            "dur": round((span.end - span.start) * 1e6, 3),
            "args": {"bytes": span.nbytes},
        }
        for span in shown
    ]
    Path(path).write_text(json.dumps({"traceEvents": [*names, *events]}))


def _pid(device: int) -> int:
    return device if device >= 0 else 999 - device  # traces have no negative ones


def _drive(device: int) -> str:
    """A machine mostly has one, which needs no number."""
    return "drive" if device == -1 else f"drive:{-1 - device}"


def _name(what: str, name: str, **where: int) -> dict[str, object]:
    return {"ph": "M", "name": f"{what}_name", **where, "args": {"name": name}}

"""A trace of two steps that is made by hand, and what is in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiered_mem.trace.records import Copy, FileMove, HostWait, Layer, Levels, Save, TraceRecord, Wait, chrome_trace

MIB = 1 << 20
ABOUT: dict[str, Any] = {
    "device budget bytes": 300 * MIB,
    "summary": [("device", "npu:0"), ("reloads on demand", "0")],
    "report": [
        ("budget", "300.0 MiB"),
        ("waits", "backward of layer 0: 50.0 ms"),
        ("", "backward of layer 1: <none> & nothing"),
        ("advice", "a budget of 280.0 MiB would do & <nothing> waits there either"),
    ],
    "advice": ["a budget of 280.0 MiB would do & <nothing> waits there either"],
}
STEP = 1.0  # seconds from one step's beginning to the next one's
STEPS = 2


def chart(*, records: Sequence[TraceRecord] | None = None, **about: Any) -> dict[str, Any]:
    """The trace as it is exported. about: in place of ABOUT; None takes a thing out."""
    said = {key: value for key, value in (ABOUT | about).items() if value is not None}
    made = [record for step in range(STEPS) for record in step_of(step)] if records is None else records
    return chrome_trace("npu:0", made, 0, said)


def write(path: Path, **about: Any) -> Path:
    path.write_text(json.dumps(chart(**about)))
    return path


def step_of(step: int) -> list[TraceRecord]:
    """Two layers forward and backward. Layer 0 leaves meanwhile, goes on to the disk, and comes back too late."""
    zero = step * STEP
    offload, reload = Copy("offload", 100 * MIB, 1), Copy("reload", 100 * MIB, 1)

    def layer(number: int, at: float, *, backward: bool = False, begins: bool = True) -> TraceRecord:
        return timed(Layer(0, step, number, backward, begins), zero + at)

    def levels(device: int, host: int, disk: int, at: float) -> TraceRecord:
        return timed(Levels(device * MIB, host * MIB, disk * MIB), zero + at)

    return [
        layer(0, 0.0),
        levels(100, 0, 0, 0.0),
        timed(Save(0, step, 0, 100 * MIB), zero + 0.1),
        layer(0, 0.2, begins=False),
        levels(200, 100, 0, 0.2),
        timed(offload, zero + 0.2, zero + 0.3),
        layer(1, 0.2),
        timed(FileMove("write", 100 * MIB), zero + 0.3, zero + 0.35),
        timed(HostWait(), zero + 0.3, zero + 0.32),
        levels(290, 100, 100, 0.35),
        layer(1, 0.4, begins=False),
        layer(1, 0.4, backward=True),
        timed(FileMove("read", 100 * MIB), zero + 0.4, zero + 0.5),
        timed(reload, zero + 0.5, zero + 0.65),
        layer(0, 0.6, backward=True),
        timed(Wait(0, reload, "reload", 0, True), zero + 0.6),
        levels(250, 0, 0, 0.7),
        layer(0, 0.8, backward=True, begins=False),
        levels(100, 0, 0, 0.8),
    ]


def timed(record: TraceRecord, *times: float) -> TraceRecord:
    record.times = times
    return record

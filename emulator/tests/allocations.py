"""What torch's allocator did, told so that two processes can be compared."""

from typing import Any

import torch


def trace() -> list[dict[str, Any]]:
    """What torch's allocator did on this device since it records."""
    return list(torch.npu.memory._snapshot()["device_traces"][torch.npu.current_device()])


def allocations(entries: list[dict[str, Any]]) -> list[tuple[str, int, int, int, int]]:
    """The same for any two runs: streams by the order in which they come, addresses by segment and offset."""
    streams: dict[int, int] = {}
    segments: dict[int, int] = {}
    rows = []
    for entry in entries:
        address = entry["addr"]
        if entry["action"] == "segment_alloc":
            segments[address] = len(segments)
        segment = max((start for start in segments if start <= address), default=0)
        stream = streams.setdefault(entry["stream"], len(streams))
        rows.append((entry["action"], entry["size"], stream, segments.get(segment, -1), address - segment))
    return rows
